"""Rank and size of this process, from its launcher's environment variables, before MPI starts.

Every launcher sets variables of its own; all functions here are functions of that mapping alone.
Slurm's variables count only for processes that `srun` itself started: under mpirun they belong to
the daemon that started the ranks.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from hpctrain.core.errors import UsageError


@dataclass(frozen=True)
class Launched:
    """Rank and size of this process, by its launcher; a field is None where no variable has it."""

    name: str  #: a key of `TITLES`, or "none" for a process on its own
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None


SINGLE_RANK = Launched("none", 0, 1, 0, 1)
#: The variable in which `hpctrain launch` names a file, which lies in its memory under this name.
#: Ranks list the shared memory of their MPI there: see transport/mpi/segments.py.
SEGMENTS = "HPCTRAIN_SEGMENTS"
#: The variable that counts the restarts of a job by `hpctrain launch` or by its script.
RESTARTS = "HPCTRAIN_RESTARTS"
#: The variables of the number of spares, which are the last ranks of an elastic job, and of the
#: smallest number of ranks with which its training goes on.
SPARES, MIN_RANKS = "HPCTRAIN_SPARES", "HPCTRAIN_MIN_RANKS"
#: The variable in which a rank tells its subprocesses that it is one: see rank_process.py.
RANK_PROCESS = "HPCTRAIN_RANK_PROCESS"

TITLES = {
    "openmpi": "Open MPI's mpirun",
    "mvapich2": "MVAPICH2's mpirun",
    "hydra": "the mpiexec of MPICH or Intel MPI",
    "pals": "the mpiexec of PALS",
    "flux": "flux run",
    "jsm": "jsrun",
    "srun": "srun",
    "pmi": "a PMI launcher",
    "none": "no launcher",
}

# name: variables of rank, size, local rank (all three must be set) and local size; both names
# if some versions use another one
_VARIABLES = {
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mvapich2": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "pals": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE PALS_LOCAL_SIZE"),
    "flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
    "jsm": (
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
}

# Slurm numbers the shells it opens (batch script, `salloc`'s interactive step) from here on up;
# they have the variables of a rank, but are none.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

_SRUN_VARIABLES = {"Open MPI": "pmix", "Cray MPICH": "cray_shasta"}  # else pmi2
_MPICH_VARIABLES = ("MPICH", "MVAPICH", "MVAPICH2", "Intel MPI")
_RANK_VARIABLES = (
    "PMI", "OMPI_", "PRTE", "HYDI", "MPI_LOCAL", "MV2_COMM_WORLD_",
    "PALS_AP", "PALS_FD", "PALS_LOCAL_", "PALS_NODEID", "PALS_RANKID", "PALS_SPOOL_DIR",
    RANK_PROCESS,
)  # fmt: skip
_USER_VARIABLES = ("OMPI_ALLOW_", "OMPI_MCA_", "PMIX_MCA_", "PRTE_ALLOW_", "PRTE_MCA_")


def set_home(environ: MutableMapping[str, str]) -> None:
    """Set HOME to the account's folder where it is unset: Open MPI would end MPI_Init."""
    folder = os.path.expanduser("~")
    environ.setdefault("HOME", folder if os.path.isabs(folder) else "/")


def launched(environ: Mapping[str, str]) -> Launched:
    """Return the rank and the sizes from the launcher's variables in `environ`."""
    for name, variables in _VARIABLES.items():
        rank, size, local_rank, local_size = (_read_integer(environ, *v.split()) for v in variables)
        if rank is not None and size is not None and local_rank is not None:
            # Slurm's plugin for Cray sets what PALS does.
            by_srun = _launched_by_srun(environ) if name == "pals" else None
            return by_srun or Launched(name, rank, size, local_rank, local_size)
    return _launched_by_srun(environ) or _launched_by_pmi(environ) or SINGLE_RANK


def must_not_be_rank(environ: Mapping[str, str], reason: str) -> None:
    """Raise UsageError, with a `reason`, in a rank of a job: each rank would start ranks."""
    job = launched(environ)
    if job.size > 1:
        raise UsageError(f"this is rank {job.rank} of {job.size}: {reason}")


def restarts(environ: Mapping[str, str]) -> int:
    """Return the number of restarts of this job, by Slurm and within its allocation."""
    return sum(_read_integer(environ, name) or 0 for name in ("SLURM_RESTART_COUNT", RESTARTS))


def allocated_tasks(environ: Mapping[str, str]) -> int | None:
    """Return the number of tasks of this Slurm allocation, over its nodes; None outside Slurm."""
    return sum(task_counts(environ)) or None


def task_counts(environ: Mapping[str, str]) -> list[int]:
    """Return the number of tasks allocated on each node of this Slurm job."""
    return _parse_task_counts(environ.get("SLURM_TASKS_PER_NODE", ""))


def nodes(hosts: Sequence[str], slurm: Sequence[str]) -> tuple[str, ...]:
    """Return the name of each rank's node, from host names and from Slurm's node names.

    Slurm's names distinguish nodes that share one host, as in a test. They are ignored if a
    launcher passes on the environment of the first node: then one name stands for several hosts.
    """
    distinct = set(zip(slurm, hosts, strict=True))
    repeated_names = {
        name for name, count in Counter(name for name, _ in distinct).items() if count > 1
    }
    pairs = zip(hosts, slurm, strict=True)
    return tuple(name if name and name not in repeated_names else host for host, name in pairs)


def without_rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the variables of a rank, for a child that starts MPI by itself."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_USER_VARIABLES) or not name.startswith(_RANK_VARIABLES)
    }


def only_pmix(environ: Mapping[str, str]) -> bool:
    """Return whether the launcher offers PMIx and no other interface to the ranks."""
    return "PMIX_RANK" in environ and not {"PMI_RANK", "PMI_FD"} & environ.keys()


def pmix_of_daemons(environ: Mapping[str, str]) -> bool:
    """Return whether PMIx belongs to daemons, which Slurm started for a launcher."""
    in_step = _read_integer(environ, "SLURM_STEP_ID", "SLURM_STEPID") is not None
    return in_step and "PMIX_RANK" in environ and launched(environ).name == "hydra"


def unstartable(
    job: Launched,
    mpi_vendor: str,
    libmpi_path: str,
    no_pmix: bool = False,
    daemons: bool = False,
) -> str | None:
    """Return the message about a launcher under which the loaded MPI would fail in MPI_Init.

    `no_pmix`: the launcher offers PMIx alone, and MPI lacks it. `daemons`: see
    `pmix_of_daemons`; all ranks of a node would have their daemon's rank, and some would wait for
    ever.
    """
    if daemons and mpi_vendor == "Open MPI":
        return (
            f"{job.size} ranks were started by {TITLES[job.name]}, but mpi4py loaded {mpi_vendor} "
            f"({libmpi_path}): the launcher belongs to another MPI, and its daemons would be taken "
            f"for the ranks. {_remedy_text(job, mpi_vendor, libmpi_path)}"
        )
    if job.name == "srun" and mpi_vendor == "MPICH" and no_pmix:
        return (
            f"{job.size} ranks were started by srun with --mpi=pmix, by option or as the site's "
            f"default, but mpi4py loaded MPICH ({libmpi_path}), which was built without PMIx. "
            + _remedy_text(job, mpi_vendor, libmpi_path)
        )
    if job.name != "openmpi" or mpi_vendor not in _MPICH_VARIABLES:
        return None
    return (
        f"{job.size} ranks were started by {TITLES[job.name]}, but mpi4py loaded {mpi_vendor} "
        f"({libmpi_path}): the launcher belongs to another MPI, and these are {job.size} jobs of "
        f"one rank. {_remedy_text(job, mpi_vendor, libmpi_path)}"
    )


def mismatch(job: Launched, mpi_size: int, mpi_vendor: str, libmpi_path: str) -> str | None:
    """Return the message about `job.size` ranks that form several jobs in MPI.

    They need not have a single rank: within Slurm a launcher starts a daemon per node by `srun`,
    and MPI may use the daemons' ranks. A size above `job.size` means parts that `srun` joined.
    """
    if mpi_size >= job.size:
        return None
    jobs_text = f"{job.size} jobs of one rank" if mpi_size == 1 else f"jobs of {mpi_size} ranks"
    return (
        f"{job.size} ranks were started by {TITLES[job.name]}, but {mpi_vendor} ({libmpi_path}), "
        f"which mpi4py loaded, has {mpi_size}: the launcher belongs to another MPI, and these are "
        f"{jobs_text}. {_remedy_text(job, mpi_vendor, libmpi_path)}"
    )


def _remedy_text(job: Launched, mpi_vendor: str, libmpi_path: str) -> str:
    command = f"hpctrain launch -n {job.size} ..."
    if job.name == "srun":
        pmi_plugin = _SRUN_VARIABLES.get(mpi_vendor, "pmi2")
        command = f"srun --mpi={pmi_plugin} -n {job.size} hpctrain ..."
    return (
        f"Start them with `{command}`, or with the mpiexec that was installed beside {libmpi_path}."
    )


def _launched_by_srun(environ: Mapping[str, str]) -> Launched | None:
    step = _read_integer(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    rank = _read_integer(environ, "SLURM_PROCID")
    size = _read_integer(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if step is None or step >= _FIRST_SPECIAL_STEP or rank is None or size is None:
        return None
    # An mpirun inside the step numbers its own ranks; where it differs, Slurm's are a daemon's.
    for variable, expected in (("PMI_RANK", rank), ("PMI_SIZE", size), ("PMIX_RANK", rank)):
        if _read_integer(environ, variable) not in (None, expected):
            return None
    node = _read_integer(environ, "SLURM_NODEID")
    counts = _parse_task_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    local_size = counts[node] if node is not None and node < len(counts) else None
    return Launched("srun", rank, size, _read_integer(environ, "SLURM_LOCALID"), local_size)


def _parse_task_counts(tasks: str) -> list[int]:
    """Return the number of tasks on each node, from Slurm's "2(x3),1"."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    return [int(count) for count, times in groups for _ in range(int(times or 1))]


def _launched_by_pmi(environ: Mapping[str, str]) -> Launched | None:
    rank, size = _read_integer(environ, "PMI_RANK"), _read_integer(environ, "PMI_SIZE")
    if rank is None or size is None:
        return None
    local_rank = _read_integer(environ, "PMI_LOCAL_RANK")
    return Launched("pmi", rank, size, local_rank, _read_integer(environ, "PMI_LOCAL_SIZE"))


def _read_integer(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the value of the first variable that is an integer of at least 0."""
    for name in names:
        value = environ.get(name, "")
        if value.isascii() and value.isdigit():
            return int(value)
    return None
