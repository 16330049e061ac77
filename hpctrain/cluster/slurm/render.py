"""`hpctrain slurm render`: a job for Slurm as the text of a script. Nothing is read or run here.

    Job (recipe, resources)  +  Site (the settings of a cluster)  ->  text

The text comes from templates/: {{ name }} stands for a value, which is quoted for the shell here,
or refused. What stands behind #SBATCH is read by sbatch alone; see sbatch.py.
"""

from __future__ import annotations

import re
import shlex
from importlib import resources

from hpctrain.cluster.slurm import sbatch
from hpctrain.cluster.slurm.job import Job, check, job_name, nodes_of, tasks_per_node
from hpctrain.cluster.slurm.site import UNKNOWN_NODES, Nodes, Site, gpu_options, with_gpus

_MARK = re.compile(r"\{\{ (\w+) \}\}")
#: What slurm/ holds: a job of the built-in recipe for each template.
DEFAULTS = {
    job.template: job
    for job in (
        Job(tasks_per_node=4),
        Job(nodes=4),
        Job(nodes=4, servers=1, arguments=("--engine", "ps-sync")),
        Job(nodes=4, sizes=(1, 2, 4)),
        Job(tasks_per_node=4, time="0:30:00", interactive=True),
    )
}


SOURCED = ". slurm/site.env && "  #: what comes before `sbatch` in the head of a template


def render(job: Job, site: Site | None = None) -> str:
    """Return the script of `job`; without a site it reads slurm/site.env when it runs.

    Raises UsageError for sizes that cannot be, and for text that could mean more than itself.
    """
    check(job, site)
    values = _interactive(job, site) if job.interactive else _batch(job, site)
    text = _fill(_template(job.template), values)
    return (
        text.replace(SOURCED, "") if site else text
    )  # the setup of a site is in the script itself


def _batch(job: Job, site: Site | None) -> dict[str, str]:
    return {
        "options": _options(job, site),
        "site": site.setup(nodes_of(job, site)) if site else _template("site.sh").rstrip(),
        "run": _run(job),
        "train": shlex.join(_train(job)),
        "max_restarts": str(job.max_restarts),
        "warn_s": str(job.warn_s),
        "placement": _placement(job, site),
        "sizes": " ".join(map(str, job.sizes)),
        "tasks_per_node": str(tasks_per_node(job, site)),
        "again": _template("again.sh").rstrip(),
    }


def _options(job: Job, site: Site | None) -> str:
    """Return the #SBATCH lines; of a heterogeneous job, those of both its parts."""
    nodes, cores = nodes_of(job, site), _cores(job, site)
    tasks, server_tasks = _tasks(job, site)
    gpus = gpu_options(job.gpus_per_node, nodes)
    first = {
        "job-name": job_name(job),
        **_size(job.nodes, tasks, cores),
        **gpus,
        "time": job.time,
        **({"array": f"0-{len(job.sizes) - 1}%1"} if job.sizes else {}),
        "signal": f"B:USR1@{job.warn_s}",
        ("requeue" if job.max_restarts else "no-requeue"): "",
        "open-mode": "append",
        **with_gpus(gpus, _more_options(job, site, nodes)),
    }
    if not job.server_nodes:
        return sbatch.lines(first)
    of_servers = _more_options(job, site, site.nodes(0) if site else UNKNOWN_NODES)
    second_component = {**_size(job.server_nodes, server_tasks, cores), **of_servers}
    return f"{sbatch.lines(first)}\n#SBATCH hetjob\n{sbatch.lines(second_component)}"


def _size(nodes: int, tasks: int, cores: int) -> dict[str, str]:
    return {"nodes": str(nodes), "ntasks-per-node": str(tasks), "cpus-per-task": str(cores)}


def _tasks(job: Job, site: Site | None) -> tuple[int, int]:
    """Return the ranks on a node, servers beside workers among them, and on one for servers."""
    workers = tasks_per_node(job, site)
    if job.server_nodes:
        return workers, job.servers // job.server_nodes
    return workers + -(-job.servers // job.nodes), 0


def _cores(job: Job, site: Site | None) -> int:
    """Return a rank's cores: the profile's, fewer where a node has not so many for all of them."""
    if job.cpus_per_task or site is None:
        return job.cpus_per_task or UNKNOWN_NODES.cpus_per_task
    (tasks, server_tasks), nodes = _tasks(job, site), nodes_of(job, site)
    limits = [nodes.cpus_per_task, nodes.cores // tasks]
    if server_tasks:  # srun takes one number for both parts
        limits.append(site.nodes(0).cores // server_tasks)
    return max(1, min(limits))


def _more_options(job: Job, site: Site | None, nodes: Nodes) -> dict[str, str]:
    return {**(site.sbatch_options(nodes) if site else {}), **job.options}


def _run(job: Job) -> str:
    """Return the shell word for the run's folder."""
    if job.out:
        return shlex.quote(job.out)
    return f"runs/{job_name(job)}-${'SLURM_ARRAY_JOB_ID' if job.sizes else 'SLURM_JOB_ID'}"


def _train(job: Job) -> list[str]:
    servers = ["--set", f"engine.servers={job.servers}", "--set", "engine.placement=dedicated"]
    return ["hpctrain", "train", job.recipe, *job.arguments, *(servers if job.servers else [])]


def _placement(job: Job, site: Site | None) -> str:
    """Return the lines that make the last ranks of a job its servers."""
    if job.server_nodes:
        return _SERVERS_APART
    placeholders = {"tasks_per_node": str(tasks_per_node(job, site)), "servers": str(job.servers)}
    return _fill(_SERVERS_BESIDE, placeholders)


_SERVERS_APART = """\
# One MPI job over both parts, with as many cores for each rank.
export SLURM_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK_HET_GROUP_0
launch=("${launch[0]}" "--het-group=0,1" "${launch[@]:1}") # a container's words may follow"""

_SERVERS_BESIDE = """\
# Ranks are dealt out to the nodes in turn: each has its workers before a server comes. Servers
# leave the GPUs, if there are any, to the workers.
unset SLURM_NTASKS_PER_NODE # srun would complain where they are not shared out evenly
workers=$((SLURM_JOB_NUM_NODES * {{ tasks_per_node }}))
size=(--distribution=cyclic -n $((workers + {{ servers }})))
launch=("${launch[0]}" "${size[@]}" "${launch[@]:1}") # a container's words may follow
# shellcheck disable=SC2016
hide='[ "$SLURM_PROCID" -lt "$0" ] || export CUDA_VISIBLE_DEVICES=; exec "$@"'
train=(bash -c "$hide" "$workers" "${train[@]}")"""


def _interactive(job: Job, site: Site | None) -> dict[str, str]:
    nodes = nodes_of(job, site)
    size = _size(job.nodes, tasks_per_node(job, site), _cores(job, site))
    gpus = gpu_options(job.gpus_per_node, nodes)
    more_options = with_gpus(gpus, _more_options(job, site, nodes))
    name = {"job-name": job_name(job)} if job.name else {}
    options = {**name, **size, **gpus, "time": job.time, **more_options}
    return {
        "site": site.setup(nodes) if site else "",
        "options": "\n".join(f"    {shlex.quote(word)}" for word in sbatch.words(options)),
        "cpus_per_task": size["cpus-per-task"],
    }


def _template(name: str) -> str:
    return resources.files("hpctrain.cluster.slurm").joinpath("templates", name).read_text()


def _fill(template: str, values: dict[str, str]) -> str:
    """Return `template` with its marks replaced; an empty one goes with its paragraph's end."""
    empty = re.compile(r"^\{\{ (\w+) \}\}\n\n?", re.M)
    text = empty.sub(lambda mark: mark[0] if values[mark[1]] else "", template)
    return _MARK.sub(lambda mark: values[mark[1]], text)
