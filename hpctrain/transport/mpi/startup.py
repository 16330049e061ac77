"""Start and end of MPI in this process.

MPI starts in `start_mpi` and not at import: cores, BLAS threads and devices must be set before
MPI_Init reads them, and `import hpctrain` must not start MPI.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from hpctrain.core import rank_marks, rank_process
from hpctrain.core.errors import OwnRankError, UsageError
from hpctrain.core.launchers import launched, set_home
from hpctrain.transport.link import Link
from hpctrain.transport.mpi import segments
from hpctrain.transport.mpi.calls import MpiCalls
from hpctrain.transport.mpi.init_limit import init_limit

from mpi4py import MPI  # isort: skip  (calls.py has kept mpi4py from starting MPI)

#: Open MPI 5.0 crashes if a message arrives in a rank that is still inside MPI_Init. Ranks leave
#: its last fence at different times (open-mpi/ompi, issue 12495); the first message waits so long.
INIT_SKEW_S = 0.05


_started_here = False  # else whoever has started MPI finalizes it


@contextmanager
def start_limit(timeout_s: float) -> Iterator[None]:
    """Mark the start of MPI, and its end; a rank that waits in it beyond `timeout_s` ends with 86.

    Its stacks are printed. Nothing else watches the ranks until their World is made.
    """
    job = launched(os.environ)
    text = (
        f"rank {job.rank} of {job.size} on {socket.gethostname()} has waited {timeout_s:g} s in "
        "the start of MPI: expected all ranks there, but one was killed, is stopped or is slower"
    )
    with init_limit(timeout_s, text):
        yield
    rank_marks.write_mark(rank_marks.HAS_MPI)


def start_mpi(comm: MPI.Intracomm | None) -> MPI.Intracomm:
    """Start MPI with THREAD_MULTIPLE unless it is running; return a duplicate of `comm`.

    By default it is over all ranks. Raises UsageError in a subprocess of a rank, which would wait
    for ever.
    """
    global _started_here
    if fault := rank_process.find_fault(os.environ):
        raise OwnRankError(fault)
    if not MPI.Is_initialized():
        set_home(os.environ)
        rank_marks.write_mark(rank_marks.STARTS_MPI)
        with warnings.catch_warnings():
            # mpi4py warns of a foreign launcher; `hpctrain.init` warns once, with a remedy.
            warnings.filterwarnings("ignore", "suspicious MPI", RuntimeWarning)
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        if MPI.COMM_WORLD.size > 1 and MPI.Get_library_version().startswith("Open MPI v5.0"):
            time.sleep(INIT_SKEW_S)
        _started_here = True
    rank_process.mark_rank(os.environ)
    duplicate = (MPI.COMM_WORLD if comm is None else comm).Dup()
    duplicate.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py then raises; a user's may end the job
    return duplicate


def job_size() -> int:
    """Return the number of ranks that the launcher has started."""
    return MPI.COMM_WORLD.size


def check_communicator(comm: object) -> None:
    """Raise UsageError unless `comm` is an intracommunicator of mpi4py with this rank in it."""
    expected = "init(comm=...) takes an intracommunicator of mpi4py"
    if MPI.Is_finalized():
        raise UsageError(f"{expected}, but MPI is finalized")
    if not isinstance(comm, MPI.Comm):
        raise UsageError(f"{expected}, not {comm!r}")
    if comm == MPI.COMM_NULL:
        raise OwnRankError(f"{expected}, not COMM_NULL: other ranks do not call init")
    if not isinstance(comm, MPI.Intracomm):
        raise UsageError(f"{expected}, not an intercommunicator: use one of its two groups")


def has_ranks_of(link: Link, comm: MPI.Intracomm) -> bool:
    """Return whether `comm` has the same ranks as `link`, in the same order."""
    waits = link.endpoint.waits
    return isinstance(waits, MpiCalls) and MPI.Comm.Compare(waits.comm, comm) == MPI.CONGRUENT


def is_thread_safe() -> bool:
    """Return whether MPI lets several threads call it at once."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def is_running() -> bool:
    """Return whether MPI was initialized and not yet finalized."""
    return MPI.Is_initialized() and not MPI.Is_finalized()


def is_started_by_caller() -> bool:
    """Return whether MPI was running when `start_mpi` was called, and still is."""
    return is_running() and not _started_here


def finalize_mpi() -> None:
    """Finalize MPI, if it was started here, after a barrier.

    A launcher may treat a rank that exits early as lost. Without a launcher Open MPI 5.0 leaves the
    segment of its only rank.
    """
    if is_running() and _started_here:
        MPI.COMM_WORLD.Barrier()
        own_segments = [*segments.mapped_segments()] if MPI.COMM_WORLD.size == 1 else []
        MPI.Finalize()
        for _, path in own_segments:
            if Path(path).name.startswith("sm_segment."):
                Path(path).unlink(missing_ok=True)


def abort_job(code: int, grace_s: float = 2.0) -> NoReturn:
    """End the whole job with exit code `code`, even while another thread is inside MPI.

    MPI_Abort may wait for a lock that the other thread holds: then this process exits alone
    after `grace_s` seconds, and the launcher ends the other ranks. If it holds the
    interpreter's lock meanwhile, a thread that needs no Python exits, with code 1.
    """
    rank_marks.write_mark(rank_marks.ABORTS, code)
    if is_running():
        nowhere = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(grace_s + 1, exit=True, file=nowhere)
        threading.Thread(target=MPI.COMM_WORLD.Abort, args=(code,), daemon=True).start()
        time.sleep(grace_s)
    os._exit(code)
