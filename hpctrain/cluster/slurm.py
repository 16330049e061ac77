"""`hpctrain slurm render`: a job for Slurm as the text of a script. Nothing is read or run here.

    Job (what to train, on how much)  +  Site (what differs from cluster to cluster)  ->  text

The text comes from templates/: {{ name }} stands for a value, which is quoted for the shell here,
or refused. What stands behind #SBATCH is read by sbatch alone; see sbatch.py.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from importlib import resources

from hpctrain.cluster import sbatch
from hpctrain.cluster.site import ANY, Nodes, Site, gpu_options
from hpctrain.errors import UsageError

_MARK = re.compile(r"\{\{ (\w+) \}\}")
_EMPTY = re.compile(r"\n{3,}")
_TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?)|(?:(\d+)(?::(\d+))?(?::(\d+))?)")
#: Of the site, what an interactive shell asks Slurm for.
_OF_SALLOC = (
    "ACCOUNT CLUSTERS CONSTRAINT EXCLUSIVE GPUS_PER_NODE GPU_BIND GRES PARTITION QOS RESERVATION"
)


@dataclass(frozen=True)
class Job:
    """What to train, and on how much; None leaves it to the site."""

    recipe: str = "digits"
    nodes: int = 1
    tasks_per_node: int | None = None  #: ranks; one per GPU where there are GPUs
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    time: str = "1:00:00"  #: as sbatch takes it: minutes, H:M:S, D-H ...
    warn_s: int = 120  #: before the time is over: the longest checkpoint, and a minute
    max_restarts: int = 20
    servers: int = 0  #: ranks beside the others that keep parameters
    server_nodes: int = 0  #: of their own for these, as a heterogeneous job; 0: beside the workers
    sizes: tuple[int, ...] = ()  #: numbers of nodes of a job array; the largest is `nodes`
    arguments: tuple[str, ...] = ()  #: of `hpctrain train`, behind the recipe
    name: str | None = None
    out: str | None = None  #: the run's folder; runs/NAME-JOBID if None
    options: dict[str, str] = field(default_factory=dict)  #: more of sbatch
    interactive: bool = False

    @property
    def template(self) -> str:
        """The file of templates/ that makes this job."""
        if self.interactive:
            return "interactive.sh"
        if self.sizes:
            return "scaling_array.sbatch"
        if self.servers:
            return "parameter_server.sbatch"
        return "one_node.sbatch" if self.nodes == 1 else "multi_node.sbatch"


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


def render(job: Job, site: Site | None = None) -> str:
    """Return the script of `job`; without a site it reads slurm/site.env when it runs.

    Raises UsageError for sizes that cannot be, and for text that could mean more than itself.
    """
    check(job, site)
    values = _interactive(job, site) if job.interactive else _batch(job, site)
    return _filled(_template(job.template), values)


def ranks(job: Job, site: Site | None = None) -> int:
    """Return how many MPI ranks the job has, servers among them."""
    return job.nodes * tasks_per_node(job, site) + job.servers


def tasks_per_node(job: Job, site: Site | None = None) -> int:
    """Return how many ranks run on a node, those of servers not counted."""
    return job.tasks_per_node or job.gpus_per_node or _nodes(job, site).tasks_per_node


def seconds(time: str) -> int:
    """Return the seconds of a time limit as sbatch takes it; raise UsageError if it would not."""
    found = _TIME.fullmatch(time)
    if not found:
        raise UsageError(f"--time {time}: expected minutes, H:M:S, D-H or D-H:M:S, as for sbatch")
    days, hours, minutes, secs, first, second, third = (int(n or 0) for n in found.groups())
    if found[1] is not None:
        return ((days * 24 + hours) * 60 + minutes) * 60 + secs
    if found[7] is not None:
        return (first * 60 + second) * 60 + third
    return first * 60 + second


def check(job: Job, site: Site | None = None) -> None:
    """Raise UsageError, which names all that is wrong, for a job that cannot be."""
    wrong = [*_numbers(job), *_places(job, site), *_texts(job)]
    limit_s = seconds(job.time)
    if limit_s <= job.warn_s:
        wrong.append(
            f"--time {job.time} is {limit_s} s, and a stop is asked for {job.warn_s} s before its "
            "end: take more time, or a smaller --warn-s (the longest checkpoint, and a minute)"
        )
    if wrong:
        raise UsageError("\n".join(wrong))
    sbatch.check(job.options, site.plugins if site else ())


def _nodes(job: Job, site: Site | None) -> Nodes:
    return site.nodes(job.gpus_per_node) if site else ANY


def _numbers(job: Job) -> list[str]:
    least = {"nodes": 1, "warn_s": 1, "gpus_per_node": 0, "servers": 0, "server_nodes": 0,
             "max_restarts": 0, "tasks_per_node": 1, "cpus_per_task": 1}  # fmt: skip
    found = [(name, n, getattr(job, name)) for name, n in least.items()]
    flags = [(f"--{name.replace('_', '-')}", n, x) for name, n, x in found if x is not None]
    flags += [("--sizes", 1, size) for size in job.sizes]
    return [f"{flag}: expected {n} or more, seen {x}" for flag, n, x in flags if x < n]


def _places(job: Job, site: Site | None) -> list[str]:
    """Return what is wrong about which ranks go where."""
    each, most = tasks_per_node(job, site), max(job.sizes, default=job.nodes)
    workers = job.nodes * each
    faults = {
        f"{each} ranks per node share {job.gpus_per_node} GPUs: each rank takes one GPU, so leave "
        "out --tasks-per-node, or name the same number": job.gpus_per_node not in (0, each),
        f"--sizes up to {most} do not go on --nodes {job.nodes}": most > job.nodes,
        f"--sizes {','.join(map(str, job.sizes))}: each size once, in rising order": (
            list(job.sizes) != sorted(set(job.sizes))
        ),
        f"--servers {job.servers} for {workers} workers: more servers than workers serve nobody": (
            job.servers > workers > 0
        ),
        "--server-nodes without --servers: nothing would run there": (
            job.server_nodes > 0 and not job.servers
        ),
        f"--servers {job.servers} cannot be divided among --server-nodes {job.server_nodes}": (
            job.server_nodes > 0 and job.servers % job.server_nodes != 0
        ),
        "--sizes and --servers exclude each other: submit a job for each size": (
            bool(job.sizes and job.servers)
        ),
        f"servers are placed by srun, and {_title(site)} starts ranks with `{_launcher(site)}`": (
            job.servers > 0 and not _launcher(site).startswith("srun")
        ),
    }
    return [fault for fault, true in faults.items() if true]


def _texts(job: Job) -> list[str]:
    texts = {"recipe": job.recipe, "--out": job.out or "", "--name": job.name or ""}
    texts |= {f"argument {n}": text for n, text in enumerate(job.arguments, start=1)}
    wrong = [
        f"{what}: expected one line without control characters, seen {text!r}"
        for what, text in texts.items()
        if not text.isprintable()
    ]
    if not job.recipe or job.recipe.startswith("-"):
        wrong.append(f"expected the name of a recipe, or its file, seen {job.recipe!r}")
    return wrong


def _title(site: Site | None) -> str:
    return site.title if site else "slurm/site.env"


def _launcher(site: Site | None) -> str:
    return site.launcher if site else "srun"


def job_name(job: Job) -> str:
    """Return the name of the job and of its run: plain letters, whatever the recipe's are."""
    stem = job.name or job.recipe.rpartition("/")[2].removesuffix(".toml")
    return re.sub(r"[^A-Za-z0-9_.-]", "_", stem).lstrip("-.") or "hpctrain"


def _batch(job: Job, site: Site | None) -> dict[str, str]:
    return {
        "options": _options(job, site),
        "site": site.setup(_nodes(job, site)) if site else _template("site.sh").rstrip(),
        "run": _run(job),
        "train": shlex.join(_train(job)),
        "max_restarts": str(job.max_restarts),
        "placement": _placement(job, site),
        "sizes": " ".join(map(str, job.sizes)),
        "tasks_per_node": str(tasks_per_node(job, site)),
        "again": _template("again.sh").rstrip(),
    }


def _options(job: Job, site: Site | None) -> str:
    """Return the #SBATCH lines; of a heterogeneous job, those of both its parts."""
    nodes = _nodes(job, site)
    beside = -(-job.servers // job.nodes) if not job.server_nodes else 0
    first = {
        "job-name": job_name(job),
        **_size(job.nodes, tasks_per_node(job, site) + beside, job, nodes),
        **gpu_options(job.gpus_per_node, nodes),
        "time": job.time,
        **({"array": f"0-{len(job.sizes) - 1}%1"} if job.sizes else {}),
        "signal": f"B:USR1@{job.warn_s}",
        "requeue": "",
        "open-mode": "append",
        **_more(job, site, nodes),
    }
    if not job.server_nodes:
        return sbatch.lines(first)
    each = job.servers // job.server_nodes
    of_servers = _more(job, site, site.nodes(0) if site else ANY)
    second = {**_size(job.server_nodes, each, job, nodes), **of_servers}
    return f"{sbatch.lines(first)}\n#SBATCH hetjob\n{sbatch.lines(second)}"


def _size(nodes: int, tasks: int, job: Job, kind: Nodes) -> dict[str, str]:
    cores = job.cpus_per_task or kind.cpus_per_task
    return {"nodes": str(nodes), "ntasks-per-node": str(tasks), "cpus-per-task": str(cores)}


def _more(job: Job, site: Site | None, nodes: Nodes) -> dict[str, str]:
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
    if job.server_nodes:
        return (
            "# One MPI job over both parts, with as many cores for each rank.\n"
            "export SLURM_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK_HET_GROUP_0\n"
            'launch+=("--het-group=0,1")'
        )
    return (
        "# Ranks are dealt out to the nodes in turn: each has its workers before a server comes.\n"
        "unset SLURM_NTASKS_PER_NODE # srun would complain where they are not shared out evenly\n"
        f"workers=$((SLURM_JOB_NUM_NODES * {tasks_per_node(job, site)}))\n"
        f"launch+=(--distribution=cyclic -n $((workers + {job.servers})))"
    )


def _interactive(job: Job, site: Site | None) -> dict[str, str]:
    nodes = _nodes(job, site)
    size = _size(job.nodes, tasks_per_node(job, site), job, nodes)
    gpus = gpu_options(job.gpus_per_node, nodes)
    options = {**size, **gpus, "time": job.time, **_more(job, site, nodes)}
    return {
        "options": "\n".join(f"    {shlex.quote(word)}" for word in sbatch.words(options)),
        "variables": _OF_SALLOC,
        "cpus_per_task": size["cpus-per-task"],
    }


def _template(name: str) -> str:
    return resources.files("hpctrain.cluster").joinpath("templates", name).read_text()


def _filled(template: str, values: dict[str, str]) -> str:
    """Return `template` with its marks replaced; a line whose only mark is empty goes."""
    kept = re.sub(
        r"^\{\{ (\w+) \}\}\n", lambda m: m[0] if values[m[1]] else "", template, flags=re.M
    )
    return _MARK.sub(lambda mark: values[mark[1]], kept)
