"""A job for Slurm: its recipe and its resources, and the checks of both."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hpctrain.cluster.slurm import sbatch
from hpctrain.cluster.slurm.site import UNKNOWN_NODES, Nodes, Site
from hpctrain.core.errors import UsageError

_TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?)|(?:(\d+)(?::(\d+))?(?::(\d+))?)")

MOST_WARN_S = 65535  #: of sbatch's --signal


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


def ranks(job: Job, site: Site | None = None) -> int:
    """Return the number of MPI ranks of the job, servers included."""
    return job.nodes * tasks_per_node(job, site) + job.servers


def tasks_per_node(job: Job, site: Site | None = None) -> int:
    """Return the number of ranks per node, servers not counted."""
    return job.tasks_per_node or job.gpus_per_node or nodes_of(job, site).tasks_per_node


def seconds(time: str) -> int:
    """Return the seconds of a time limit as sbatch takes it; raise UsageError if it would not."""
    match = _TIME.fullmatch(time)
    if not match:
        raise UsageError(f"--time {time}: expected minutes, H:M:S, D-H or D-H:M:S, as for sbatch")
    days, hours, minutes, secs, first, second_part, third_part = (
        int(n or 0) for n in match.groups()
    )
    if match[1] is not None:
        return ((days * 24 + hours) * 60 + minutes) * 60 + secs
    if match[7] is not None:
        return (first * 60 + second_part) * 60 + third_part
    return first * 60 + second_part


def nodes_of(job: Job, site: Site | None) -> Nodes:
    """Return the kind of node that the job runs on; raise UsageError where the site has none."""
    return site.nodes(job.gpus_per_node) if site else UNKNOWN_NODES


def check(job: Job, site: Site | None = None) -> None:
    """Raise UsageError, which names all that is wrong, for a job that cannot be."""
    faults_found = [*_number_faults(job), *_placement_faults(job, site), *text_faults(job)]
    limit_s = seconds(job.time)
    faults_found += _interactive_faults(job) if job.interactive else _stop_faults(job, limit_s)
    if faults_found:
        raise UsageError("\n".join(faults_found))
    sbatch.check(job.options, site.plugins if site else ())


def _interactive_faults(job: Job) -> list[str]:
    """Return the faults of an interactive job: options that only a script for sbatch can have."""
    names = ("servers", "server_nodes", "sizes", "out", "warn_s", "max_restarts")
    default_job = Job()
    unsuitable = [_flag(name) for name in names if getattr(job, name) != getattr(default_job, name)]
    unsuitable += [flag for flag in ("--engine", "--epochs", "--set") if flag in job.arguments]
    unsuitable += [f"--option {name}" for name in job.options if name in sbatch.NOT_OF_SALLOC]
    text = "--interactive asks salloc for nodes and trains nothing"
    return [f"{text}: leave out {', '.join(unsuitable)}"] if unsuitable else []


def _stop_faults(job: Job, limit_s: int) -> list[str]:
    """Return the faults in the time of the stop signal."""
    faults_found = []
    if job.warn_s > MOST_WARN_S:
        faults_found.append(
            f"--warn-s: expected {MOST_WARN_S} at most, as of sbatch, seen {job.warn_s}"
        )
    if limit_s <= job.warn_s:
        faults_found.append(
            f"--time {job.time} is {limit_s} s, and a stop is asked for {job.warn_s} s before its "
            "end: take more time (or submit with a smaller --warn-s: the longest checkpoint, and a "
            "minute)"
        )
    return faults_found


def _number_faults(job: Job) -> list[str]:
    minimum = {"nodes": 1, "warn_s": 1, "gpus_per_node": 0, "servers": 0, "server_nodes": 0,
             "max_restarts": 0, "tasks_per_node": 1, "cpus_per_task": 1}  # fmt: skip
    values = [(name, n, getattr(job, name)) for name, n in minimum.items()]
    flags = [(_flag(name), n, x) for name, n, x in values if x is not None]
    flags += [("--sizes", 1, size) for size in job.sizes]
    return [f"{flag}: expected {n} or more, seen {x}" for flag, n, x in flags if x < n]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _placement_faults(job: Job, site: Site | None) -> list[str]:
    """Return the faults in the placement of ranks on nodes."""
    tasks, max_nodes = tasks_per_node(job, site), max(job.sizes, default=job.nodes)
    workers = job.nodes * tasks
    faults = {
        f"{tasks} ranks per node share {job.gpus_per_node} GPUs: each rank takes one GPU, so leave "
        "out --tasks-per-node, or name the same number": job.gpus_per_node not in (0, tasks),
        f"--sizes up to {max_nodes} do not go on --nodes {job.nodes}": max_nodes > job.nodes,
        f"--sizes {','.join(map(str, job.sizes))}: each size once, in rising order": (
            list(job.sizes) != sorted(set(job.sizes))
        ),
        f"--servers {job.servers} for {workers} workers: more servers than workers serve nobody": (
            job.servers > workers > 0
        ),
        f"--server-nodes {job.server_nodes}: {_title(site)} has no nodes without GPUs; leave it "
        "out, and servers run beside the workers": (
            bool(job.server_nodes and site and not site.cpu)
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
    return [fault for fault, applies in faults.items() if applies]


def text_faults(job: Job) -> list[str]:
    """Return the faults in the texts of a job, each of which must be one line."""
    texts = {"recipe": job.recipe, "--out": job.out or "", "--job-name": job.name or ""}
    texts |= {f"argument {n}": text for n, text in enumerate(job.arguments, start=1)}
    faults_found = [
        f"{label}: expected one line without control characters, seen {text!r}"
        for label, text in texts.items()
        if not text.isprintable()
    ]
    if not job.recipe or job.recipe.startswith("-"):
        faults_found.append(f"expected the name of a recipe, or its file, seen {job.recipe!r}")
    return faults_found


def _title(site: Site | None) -> str:
    return site.title if site else "slurm/site.env"


def _launcher(site: Site | None) -> str:
    return site.launcher if site else "srun"


def job_name(job: Job) -> str:
    """Return the name of the job and of its run: plain letters, whatever the recipe's are."""
    stem = job.name or job.recipe.rpartition("/")[2].removesuffix(".toml")
    return re.sub(r"[^A-Za-z0-9_.-]", "_", stem).lstrip("-.") or "hpctrain"
