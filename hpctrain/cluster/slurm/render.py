"""`hpctrain slurm render`: a Slurm job as the text of a script; pure functions.

    Job (recipe, resources)  +  Site (the settings of a cluster)  ->  text

The text comes from templates/: {{ name }} stands for a value, which is quoted for the shell or
refused. The rest of an #SBATCH line is read by sbatch alone; see sbatch.py.
"""

from __future__ import annotations

import re
import shlex
from importlib import resources
from pathlib import Path

from hpctrain.cluster.slurm import batch_job, sbatch
from hpctrain.cluster.slurm.job import (
    Job,
    check_job,
    job_name,
    node_kind,
    rank_words,
    tasks_per_node,
)
from hpctrain.cluster.slurm.site import UNKNOWN_NODES, Nodes, Site, gpu_options, merge_gpu_options
from hpctrain.core.names import fold_names

_PLACEHOLDER = re.compile(r"\{\{ (\w+) \}\}")
#: The jobs whose scripts lie in slurm/: the built-in recipe with each template.
DEFAULT_JOBS = {
    job.file_name: job
    for job in (
        Job(tasks_per_node=4),
        Job(nodes=4),
        Job(nodes=4, servers=1, arguments=("--engine", "ps-sync")),
        Job(nodes=4, sizes=(1, 2, 4)),
        Job(tasks_per_node=4, time="0:30:00", interactive=True),
    )
}


#: The comment on what runs: a recipe, or a program.
ABOUT = (
    "What is trained; results in runs/, as `hpctrain train --out` makes them.",
    "What runs; it finds the folder of its job in HPCTRAIN_RUN.",
)
#: Runs the job: a copy is sent along with a script.
SENT_FILE = Path(batch_job.__file__)
SOURCE_COMMAND = ". slurm/site.env && "  #: precedes `sbatch` in the head of a template


def render(job: Job, site: Site | None = None, folder: Path = Path("slurm")) -> str:
    """Return the script of `job`; without a site the script reads slurm/site.env when it runs.

    `folder`: holds batch_job.py, for batch hosts without hpctrain. Raises UsageError for impossible
    sizes, and for text that a shell or sbatch would interpret.
    """
    check_job(job, site)
    if job.interactive:
        script = fill_template(_read_template(job.file_name), _interactive_values(job, site))
    else:
        script = fill_template(_read_template("job.sbatch"), _batch_values(job, site, folder))
    if job not in DEFAULT_JOBS.values():  # it does not lie in slurm/
        script = script.replace(f"slurm/{job.file_name}", "FILE")
    # A script for a site contains the site's setup, so it needs no site.env.
    return script.replace(SOURCE_COMMAND, "") if site else script


def _batch_values(job: Job, site: Site | None, folder: Path) -> dict[str, str]:
    title, hint = _HEADS[job.file_name]
    tasks, placement, size = tasks_per_node(job, site), "", ""
    if job.sizes:
        size = f'--size="-n $((nodes * {tasks}))" --nodes="$nodes" '
    elif job.server_nodes:
        placement, size = _SERVERS_ON_OWN_NODES, "--size=--het-group=0,1 "
    elif job.servers:
        placement = fill_template(_SERVERS_ON_WORKER_NODES, {"tasks_per_node": str(tasks)})
        size = f'--size="--distribution=cyclic -n $((workers + {job.servers}))" '
    elif job.elastic:
        placement = _elastic_launcher(job)
    # An elastic job is started again by `hpctrain launch`.
    policy = {"max-restarts": job.max_restarts, "relaunches": 0 if job.elastic else job.relaunches,
              "min-ranks": job.min_ranks or 0, "warn-s": job.warn_s}  # fmt: skip
    servers = ["--set", f"engine.servers={job.servers}", "--set", "engine.placement=dedicated"]
    servers = servers if job.servers else []
    policy = {"program": 1, **policy} if job.program else policy
    words = [*rank_words(job), *servers]
    if job.elastic:  # `hpctrain launch` is called with a command, or a program after `--`
        words = ["--", *words] if job.program else words[1:]
    return {
        "title": title,
        "file": job.file_name,
        "hint": hint,
        "options": _sbatch_lines(job, site),
        "site": site.setup_script(node_kind(job, site))
        if site
        else _read_template("site.sh").rstrip(),
        "array": _array_lines(job),
        "about": ABOUT[bool(job.program)],
        "run": _run_folder_word(job),
        "train": " ".join([shlex.join(words), *['"${values[@]}"'] * bool(job.tasks)]),
        "placement": placement,
        "sent_file": shlex.quote(str(folder / SENT_FILE.name)),
        "policy": " ".join(f"--{name}={value}" for name, value in policy.items()),
        "size": size,
    }


#: The title of a script, and a comment on options of sbatch.
_HEADS = {
    "one_node.sbatch": (
        "Train on one node, an MPI rank per GPU or per group of cores",
        "# Options of sbatch go before these lines: on four GPUs, each rank seeing all of them,\n"
        "#   sbatch --ntasks-per-node=4 --gpus-per-node=4 slurm/one_node.sbatch",
    ),
    "multi_node.sbatch": (
        "Train on several nodes, an MPI rank per GPU or per group of cores",
        "# Options of sbatch go before these lines: on 8 nodes of four GPUs, each rank seeing its "
        "node's,\n"
        "#   sbatch --nodes=8 --ntasks-per-node=4 --gpus-per-node=4 slurm/multi_node.sbatch",
    ),
    "parameter_server.sbatch": (
        "Train with parameter servers, ranks that keep the parameters and need no GPU",
        "# The last ranks of a job serve.",
    ),
    "sweep_array.sbatch": (
        "Train each member of a sweep, a task of a job array",
        "# A task is put back into the queue by itself.",
    ),
    "scaling_array.sbatch": (
        "Train the same on 1, 2, 4 ... nodes, a task of a job array for each size, one after the "
        "other",
        "# All tasks of an array have the same nodes, and use as many of them as their size says. "
        "Where nodes\n"
        "# are dear, submit slurm/multi_node.sbatch with --nodes of each size instead.",
    ),
}


def _sbatch_lines(job: Job, site: Site | None) -> str:
    """Return the #SBATCH lines; for a heterogeneous job the lines of both parts."""
    nodes, cores = node_kind(job, site), cores_per_task(job, site)
    tasks, server_tasks = _tasks_per_node(job, site)
    gpu_request = gpu_options(job.gpus_per_node, nodes)
    worker_options = {
        "job-name": job_name(job),
        **_size_options(job.nodes, tasks, cores),
        **gpu_request,
        "time": job.time,
        **({"array": _array_range(job)} if job.sizes or job.tasks else {}),
        "signal": f"B:USR1@{job.warn_s}",
        ("requeue" if job.max_restarts else "no-requeue"): "",
        "open-mode": "append",
        **({"no-kill": ""} if job.min_ranks else {}),  # the job survives the loss of a node
        **merge_gpu_options(gpu_request, _extra_options(job, site, nodes)),
    }
    if not job.server_nodes:
        return sbatch.sbatch_lines(worker_options)
    server_extras = _extra_options(job, site, site.node_kind(0) if site else UNKNOWN_NODES)
    server_options = {**_size_options(job.server_nodes, server_tasks, cores), **server_extras}
    parts = map(sbatch.sbatch_lines, (worker_options, server_options))
    return "\n#SBATCH hetjob\n".join(parts)


def _size_options(nodes: int, tasks: int, cores: int) -> dict[str, str]:
    return {"nodes": str(nodes), "ntasks-per-node": str(tasks), "cpus-per-task": str(cores)}


def _tasks_per_node(job: Job, site: Site | None) -> tuple[int, int]:
    """Return the ranks on a node with workers and, for nodes of servers alone, on such a node."""
    workers = tasks_per_node(job, site)
    if job.server_nodes:
        return workers, job.servers // job.server_nodes
    return workers + -(-job.servers // job.nodes), 0


def cores_per_task(job: Job, site: Site | None) -> int:
    """Return the cores of a rank: as in the profile, or fewer if its node has too few for all."""
    if job.cpus_per_task or site is None:
        return job.cpus_per_task or UNKNOWN_NODES.cpus_per_task
    (tasks, server_tasks), nodes = _tasks_per_node(job, site), node_kind(job, site)
    limits = [nodes.cpus_per_task, nodes.cores // tasks]
    if server_tasks:  # srun accepts only one number for both parts
        limits.append(site.node_kind(0).cores // server_tasks)
    return max(1, min(limits))


def _extra_options(job: Job, site: Site | None, nodes: Nodes) -> dict[str, str]:
    return {**(site.job_options(nodes) if site else {}), **job.options}


def _run_folder_word(job: Job) -> str:
    """Return the run's folder as a word of shell."""
    variable = "SLURM_ARRAY_JOB_ID" if job.sizes or job.tasks else "SLURM_JOB_ID"
    folder = shlex.quote(job.out) if job.out else f"runs/{job_name(job)}-${variable}"
    return folder + "/nodes-$nodes" * bool(job.sizes) + "/$member" * bool(job.tasks)


def _array_range(job: Job) -> str:
    """Return the numbers of an array's tasks; sizes run one after the other."""
    if job.sizes:
        return f"0-{len(job.sizes) - 1}%1"
    return fold_names(str(task.number) for task in job.tasks)[0].strip("[]")


def _array_lines(job: Job) -> str:
    """Return the shell lines that choose what a task of an array trains; empty for other jobs."""
    if job.sizes:
        return _SIZES.format(" ".join(map(str, job.sizes)))
    cases = [
        f"{task.number}) member={task.name} values=({shlex.join(task.arguments)}) ;;"
        for task in job.tasks
    ]
    return "\n".join(["case $SLURM_ARRAY_TASK_ID in", *cases, _NO_MEMBER, "esac"]) if cases else ""


def _elastic_launcher(job: Job) -> str:
    """Return the shell line that names the launcher of an elastic job.

    Its spares are among the ranks that fit into its allocation.
    """
    spares = f"--spares {job.spares} " * (job.spares > 0)
    min_ranks = f"--min-ranks {job.min_ranks} " * (job.min_ranks is not None)
    return (
        f'export HPCTRAIN_LAUNCHER="hpctrain launch --elastic {spares}{min_ranks}'
        f'--max-restarts {job.relaunches} -n $((SLURM_NTASKS - {job.spares}))"'
    )


_SIZES = "sizes=({})\nnodes=${{sizes[$SLURM_ARRAY_TASK_ID]}}"

_NO_MEMBER = '*) echo "no member $SLURM_ARRAY_TASK_ID" >&2 && exit 2 ;;'

_SERVERS_ON_OWN_NODES = """\
# One MPI job over both parts, with as many cores for each rank.
export SLURM_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK_HET_GROUP_0"""

_SERVERS_ON_WORKER_NODES = """\
# Ranks are dealt out to the nodes in turn: each has its workers before a server comes. Servers
# leave the GPUs, if there are any, to the workers.
unset SLURM_NTASKS_PER_NODE # srun would complain where they are not shared out evenly
workers=$((SLURM_JOB_NUM_NODES * {{ tasks_per_node }}))
# shellcheck disable=SC2016
hide='[ "$SLURM_PROCID" -lt "$0" ] || export CUDA_VISIBLE_DEVICES=; exec "$@"'
train=(bash -c "$hide" "$workers" "${train[@]}")"""


def _interactive_values(job: Job, site: Site | None) -> dict[str, str]:
    nodes = node_kind(job, site)
    size_options = _size_options(job.nodes, tasks_per_node(job, site), cores_per_task(job, site))
    gpu_request = gpu_options(job.gpus_per_node, nodes)
    extra_options = merge_gpu_options(gpu_request, _extra_options(job, site, nodes))
    name_option = {"job-name": job_name(job)} if job.name else {}
    options = {**name_option, **size_options, **gpu_request, "time": job.time, **extra_options}
    return {
        "site": site.setup_script(nodes) if site else "",
        "options": "\n".join(f"    {shlex.quote(word)}" for word in sbatch.option_words(options)),
        "cpus_per_task": size_options["cpus-per-task"],
    }


def _read_template(name: str) -> str:
    return resources.files("hpctrain.cluster.slurm").joinpath("templates", name).read_text()


def fill_template(template: str, values: dict[str, str]) -> str:
    """Return `template` with its placeholders replaced by `values`.

    A line with only an empty value is removed, with the blank line after it.
    """
    empty_line_pattern = re.compile(r"^\{\{ (\w+) \}\}\n\n?", re.M)
    text = empty_line_pattern.sub(lambda match: match[0] if values[match[1]] else "", template)
    return _PLACEHOLDER.sub(lambda match: values[match[1]], text)
