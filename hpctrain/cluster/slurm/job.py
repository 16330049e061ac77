"""A Slurm job: its recipe and resources, and the checks of both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hpctrain.cluster.slurm import sbatch
from hpctrain.cluster.slurm.site import UNKNOWN_NODES, Nodes, Site, must_have_scheduler
from hpctrain.core.errors import UsageError

_TIME_PATTERN = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?)|(?:(\d+)(?::(\d+))?(?::(\d+))?)")

MAX_WARN_S = 65535  #: the limit of sbatch's --signal


@dataclass(frozen=True)
class JobOptions:
    """The options of a job and of its request; the site decides on a field that is None."""

    recipe: str = "digits"  #: a name, or a .toml file
    program: Sequence[str] = ()  #: a program with its arguments, in place of the recipe
    tasks_per_node: int | None = None  #: ranks; on nodes with GPUs one per GPU
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    time: str = "1:00:00"  #: the time limit in sbatch's notation: minutes, H:M:S, D-H ...
    #: From the stop signal to the time limit: the longest checkpoint and a minute.
    warn_s: int = 120
    max_restarts: int = 20  #: by Slurm, which puts the job back into its queue
    relaunches: int = 3  #: restarts in one allocation
    min_ranks: int | None = None  #: on the nodes that remain after a loss; None: all
    elastic: bool = False  #: the survivors of a lost rank go on, under Open MPI's mpiexec
    spares: int = 0  #: of the ranks of an elastic job, those that wait to replace lost ones
    servers: int = 0  #: additional ranks that are parameter servers
    server_nodes: int = 0  #: nodes for servers alone (a heterogeneous job); 0: on workers' nodes
    sizes: Sequence[int] = ()  #: numbers of nodes of a job array; the largest is `nodes`
    out: str | None = None  #: the run's folder; runs/NAME-JOBID if None
    options: Mapping[str, str] = field(default_factory=dict)  #: further options of sbatch


class Task(NamedTuple):
    """A member of a sweep, as a task of a job array."""

    number: int
    name: str  #: of its folder, below the sweep's
    arguments: tuple[str, ...]  #: of `hpctrain train` after the recipe


@dataclass(frozen=True)
class Job(JobOptions):
    """The recipe and the resources of a job."""

    nodes: int = 1
    arguments: tuple[str, ...] = ()  #: arguments of `hpctrain train` after the recipe
    name: str | None = None
    interactive: bool = False
    tasks: tuple[Task, ...] = ()  #: of the array of a sweep; empty for one run

    @property
    def limit_s(self) -> int:
        """The time limit in seconds."""
        return parse_time_limit_s(self.time)

    @property
    def file_name(self) -> str:
        """The script in slurm/ of jobs of this kind."""
        if self.interactive:
            return "interactive.sh"
        if self.sizes:
            return "scaling_array.sbatch"
        if self.tasks:
            return "sweep_array.sbatch"
        if self.servers:
            return "parameter_server.sbatch"
        return "one_node.sbatch" if self.nodes == 1 else "multi_node.sbatch"


def total_ranks(job: Job, site: Site | None = None) -> int:
    """Return the number of MPI ranks that train or serve."""
    return job.nodes * tasks_per_node(job, site) + job.servers - job.spares


def tasks_per_node(job: Job, site: Site | None = None) -> int:
    """Return the number of workers per node."""
    return job.tasks_per_node or job.gpus_per_node or node_kind(job, site).tasks_per_node


def parse_time_limit_s(time: str) -> int:
    """Return the seconds of a time limit in sbatch's notation; raise UsageError if it is wrong."""
    match = _TIME_PATTERN.fullmatch(time)
    if not match:
        raise UsageError(f"--time {time}: expected minutes, H:M:S, D-H or D-H:M:S, such as 2:00:00")
    days, hours, minutes, seconds, field1, field2, field3 = (int(n or 0) for n in match.groups())
    if match[1] is not None:
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if match[7] is not None:
        return (field1 * 60 + field2) * 60 + field3
    return field1 * 60 + field2


def node_kind(job: Job, site: Site | None) -> Nodes:
    """Return the kind of node that the job needs; raise UsageError if the site lacks it."""
    return site.node_kind(job.gpus_per_node) if site else UNKNOWN_NODES


def check_job(job: Job, site: Site | None = None) -> None:
    """Raise a UsageError that lists all faults of an impossible job of Slurm."""
    must_have_scheduler(site, "slurm")
    faults = resource_faults(job, site)
    if job.interactive:
        faults += _interactive_faults(job)
    elif job.warn_s > MAX_WARN_S:
        faults.append(f"--warn-s: expected at most {MAX_WARN_S}, sbatch's limit, seen {job.warn_s}")
    must_have_no_faults(faults)
    sbatch.check_options(job.options, site.plugins if site else ())


def resource_faults(job: Job, site: Site | None = None) -> list[str]:
    """Return the faults of a job of any scheduler, its further options excepted."""
    faults = [*_range_faults(job), *_placement_faults(job, site)]
    faults += [*_loss_faults(job, site), *_program_faults(job), *text_faults(job)]
    return faults + _stop_time_faults(job, job.limit_s) * (not job.interactive)


def must_have_no_faults(faults: Sequence[str]) -> None:
    """Raise a UsageError that lists the faults, if there are any."""
    if faults:
        raise UsageError("\n".join(faults))


def _interactive_faults(job: Job) -> list[str]:
    """Return the faults of an interactive job: options that only batch jobs have."""
    option_fields = ("servers", "server_nodes", "sizes", "out", "warn_s", "max_restarts",
                     "relaunches", "min_ranks", "elastic", "spares")  # fmt: skip
    default_job = Job()
    unsuitable_options = [
        _option_name(name)
        for name in option_fields
        if getattr(job, name) != getattr(default_job, name)
    ]
    unsuitable_options += [
        option
        for option in ("--engine", "--epochs", "--set")
        if option in (*job.arguments, *(word for task in job.tasks for word in task.arguments))
    ]
    unsuitable_options += [
        f"--option {name}" for name in job.options if name in sbatch.SBATCH_ONLY_OPTIONS
    ]
    prefix = "--interactive asks salloc for nodes and trains nothing"
    return [f"{prefix}: leave out {', '.join(unsuitable_options)}"] if unsuitable_options else []


def _program_faults(job: Job) -> list[str]:
    """Return the faults of a program's job: options that only a recipe has."""
    values = {"--servers": job.servers, "--sizes": job.sizes, "--interactive": job.interactive}
    options = [name for name, value in values.items() if value]
    options += [name for name in ("--engine", "--epochs", "--set") if name in job.arguments]
    if not job.program or not options:
        return []
    return [f"{', '.join(options)}: of a recipe; leave out for a program, seen {job.program[0]}"]


def _stop_time_faults(job: Job, limit_s: int) -> list[str]:
    """Return the faults in the time of the stop signal."""
    if limit_s > job.warn_s:
        return []
    return [
        f"--time {job.time} is {limit_s} s, but the stop signal comes {job.warn_s} s before "
        "the end: take more time, or a smaller --warn-s (the time of the longest checkpoint "
        "and a minute)"
    ]


def _range_faults(job: Job) -> list[str]:
    minima = {"nodes": 1, "warn_s": 1, "gpus_per_node": 0, "servers": 0, "server_nodes": 0,
             "max_restarts": 0, "relaunches": 0, "min_ranks": 1, "spares": 0,
             "tasks_per_node": 1, "cpus_per_task": 1}  # fmt: skip
    values = [(name, n, getattr(job, name)) for name, n in minima.items()]
    given_options = [(_option_name(name), n, x) for name, n, x in values if x is not None]
    given_options += [("--sizes", 1, size) for size in job.sizes]
    return [f"{option}: expected {n} or more, seen {x}" for option, n, x in given_options if x < n]


def _option_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _placement_faults(job: Job, site: Site | None) -> list[str]:
    """Return the faults in the placement of ranks on nodes."""
    tasks, max_size = tasks_per_node(job, site), max(job.sizes, default=job.nodes)
    workers = job.nodes * tasks
    faults = {
        f"{tasks} ranks per node share {job.gpus_per_node} GPUs: each rank takes one GPU, so leave "
        "out --tasks-per-node, or give the same number": job.gpus_per_node not in (0, tasks),
        f"--sizes up to {max_size} do not fit on --nodes {job.nodes}": max_size > job.nodes,
        f"--sizes {','.join(map(str, job.sizes))}: give each size once, in ascending order": (
            list(job.sizes) != sorted(set(job.sizes))
        ),
        f"--servers {job.servers} for {workers} workers: take at most one server per worker": (
            job.servers > workers > 0
        ),
        f"--server-nodes {job.server_nodes}: {_site_title(site)} has no nodes without GPUs; leave "
        "it out, and servers run on the nodes of workers": (
            bool(job.server_nodes and site and not site.cpu)
        ),
        "--server-nodes without --servers: these nodes would be idle": (
            job.server_nodes > 0 and not job.servers
        ),
        f"--servers {job.servers} cannot be divided among --server-nodes {job.server_nodes}": (
            job.server_nodes > 0 and job.servers % job.server_nodes != 0
        ),
        "--sizes and --servers exclude each other: submit one job per size": (
            bool(job.sizes and job.servers)
        ),
        "--sizes and --server-nodes: a sweep's jobs have one size and one part": (
            bool(job.tasks and (job.sizes or job.server_nodes))
        ),
        f"srun places servers, but {_site_title(site)} starts ranks with "
        f"`{_site_launcher(site)}`": (
            job.servers > 0 and not _site_launcher(site).startswith("srun")
        ),
    }
    return [fault for fault, is_present in faults.items() if is_present]


def text_faults(job: Job) -> list[str]:
    """Return the faults in the texts of a job: each must be one printable line."""
    texts = {"recipe": job.recipe, "--out": job.out or "", "--job-name": job.name or ""}
    arguments = [*job.program, *job.arguments]
    texts |= {f"argument {n}": text for n, text in enumerate(arguments, start=1)}
    faults = [
        f"{label}: expected one line without control characters, seen {text!r}"
        for label, text in texts.items()
        if not text.isprintable()
    ]
    if not job.program and (not job.recipe or job.recipe.startswith("-")):
        faults.append(f"expected the name or the file of a recipe, seen {job.recipe!r}")
    return faults


def _loss_faults(job: Job, site: Site | None) -> list[str]:
    """Return the faults of the options that say how a job goes on after the loss of ranks."""
    ranks, min_ranks = total_ranks(job, site), job.min_ranks or 1
    has_fixed_size = bool(job.servers or job.sizes)
    faults = {
        "--min-ranks: the number of ranks of a job with --servers or --sizes is fixed": (
            has_fixed_size and job.min_ranks is not None
        ),
        "--elastic: a job with --servers or --sizes is started by srun, which cannot run ULFM": (
            has_fixed_size and job.elastic
        ),
        f"--spares {job.spares}: only an elastic job has spares; add --elastic": (
            job.spares > 0 and not job.elastic
        ),
        f"--min-ranks {min_ranks}: expected at most {ranks}, the job's ranks without spares": (
            ranks < min_ranks and not has_fixed_size
        ),
    }
    return [fault for fault, is_present in faults.items() if is_present]


def rank_words(job: Job) -> list[str]:
    """Return the command of a rank, without the arguments of its launch."""
    return [*job.program] or ["hpctrain", "train", job.recipe, *job.arguments]


def _site_title(site: Site | None) -> str:
    return site.title if site else "slurm/site.env"


def _site_launcher(site: Site | None) -> str:
    return site.start_command if site else "srun"


def job_name(job: Job) -> str:
    """Return the name of the job and of its run; special characters become underscores."""
    scripts = [word for word in job.program if word.endswith(".py")]
    subject = next(iter([*scripts, *job.program]), job.recipe)
    stem = job.name or re.sub(r"\.(toml|py)$", "", subject.rpartition("/")[2])
    return re.sub(r"[^A-Za-z0-9_.-]", "_", stem).lstrip("-.") or "hpctrain"
