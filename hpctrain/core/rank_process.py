"""Subprocesses of a rank: they inherit its launcher's variables, and its place in MPI is taken.

    rank 1, process 70     HPCTRAIN_RANK_PROCESS = 70 PMI_RANK=1 ...     PMI_RANK=1
    its subprocess 71      the same                                      PMI_RANK=1    refused
    mpiexec in it, 73      the same                                      PMI_RANK=0    a new job
    subprocess 74          the same                                      none          a new job

MPI_Init of process 71 would wait for ever: the launcher has no second rank 1. MPICH's launcher sets
the same variables in each job, so its socket counts, too: a subprocess inherits its rank's socket
or, since Python closes files, no socket.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, MutableMapping

from hpctrain.core.launchers import RANK_PROCESS, TITLES, launched

#: What tells a rank from ranks of other jobs.
_IDENTITY = (
    "PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "PMI_ID", "PMI_JOBID", "PMI_PORT",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "PALS_APID",
    "PALS_RANKID", "FLUX_JOB_ID", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK", "SLURM_JOB_ID",
    "SLURM_STEP_ID", "SLURM_PROCID",
)  # fmt: skip


def mark_rank(environ: MutableMapping[str, str]) -> None:
    """Note in `environ` that this process is the rank of its launcher's variables."""
    environ[RANK_PROCESS] = f"{os.getpid()} {_launcher_socket(environ)} {_rank_identity(environ)}"


def find_fault(environ: Mapping[str, str]) -> str | None:
    """Return the fault of a process that has the place of a rank that started it."""
    mark_fields = environ.get(RANK_PROCESS, "").split(" ", 2)
    job = launched(environ)
    if len(mark_fields) < 3 or job.name == "none" or mark_fields[0] == str(os.getpid()):
        return None
    has_own_socket = _launcher_socket(environ) not in ("none", mark_fields[1])
    if mark_fields[2] != _rank_identity(environ) or has_own_socket:
        return None
    return (
        f"this process was started by rank {job.rank} of {job.size} (process {mark_fields[0]}), "
        f"and has the variables of {TITLES[job.name]} from it; expected a process that the "
        "launcher started, since MPI would wait here for ever. For a job of its own start it "
        "without them: subprocess.run(..., "
        "env=hpctrain.core.launchers.without_rank_variables(os.environ))"
    )


def _rank_identity(environ: Mapping[str, str]) -> str:
    return " ".join(f"{name}={environ[name]}" for name in _IDENTITY if name in environ)


def _launcher_socket(environ: Mapping[str, str]) -> str:
    """Return the number of the socket to the launcher; "none" if this process does not have it."""
    try:
        status = os.fstat(int(environ["PMI_FD"]))
    except (KeyError, ValueError, OSError, OverflowError):
        return "none"
    return str(status.st_ino) if stat.S_ISSOCK(status.st_mode) else "none"
