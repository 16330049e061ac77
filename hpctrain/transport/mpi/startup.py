"""Start and end of MPI in this process.

MPI starts in `start_mpi` and not at import: cores, BLAS threads and devices must be set before
MPI_Init reads them, and `import hpctrain` must not start MPI.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
import warnings

from hpctrain.transport.mpi.link import MpiLink
from hpctrain.watch import Entry

from mpi4py import MPI  # isort: skip  (link.py has kept mpi4py from starting MPI)

#: Open MPI 5.0 crashes if a message arrives in a rank that is still inside MPI_Init. Ranks leave
#: its last fence at different times (open-mpi/ompi, issue 12495); the first message waits so long.
INIT_SKEW_S = 0.05


def start_mpi(entry: Entry, timeout_s: float) -> MpiLink:
    """Start MPI with THREAD_MULTIPLE unless it is running, and return a link to all ranks.

    If a rank never comes, the others exit after `timeout_s` with their stacks and exit code 1.
    """
    if not MPI.Is_initialized():
        # mpi4py holds the interpreter's lock in MPI_Init, so no Python thread could time it.
        faulthandler.dump_traceback_later(timeout_s, exit=True)
        with warnings.catch_warnings():
            # mpi4py warns of a foreign launcher; `hpctrain.init` warns once, with a remedy.
            warnings.filterwarnings("ignore", "suspicious MPI", RuntimeWarning)
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        faulthandler.cancel_dump_traceback_later()
        if MPI.COMM_WORLD.size > 1 and MPI.Get_library_version().startswith("Open MPI v5.0"):
            time.sleep(INIT_SKEW_S)
    return MpiLink(MPI.COMM_WORLD.Dup(), entry)


def is_thread_safe() -> bool:
    """Return whether MPI lets several threads call it at once."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def is_running() -> bool:
    """Return whether MPI was initialized and not yet finalized."""
    return MPI.Is_initialized() and not MPI.Is_finalized()


def finalize_mpi() -> None:
    """Finalize MPI after a barrier: a launcher may treat a rank that exits early as lost."""
    if is_running():
        MPI.COMM_WORLD.Barrier()
        MPI.Finalize()


def abort_job(code: int, grace_s: float = 2.0) -> None:
    """End the whole job with exit code `code`, even while another thread is inside MPI.

    MPI_Abort may wait for a lock that the other thread holds: then this process exits alone
    after `grace_s` seconds, and the launcher ends the other ranks.
    """
    if is_running():
        threading.Thread(target=MPI.COMM_WORLD.Abort, args=(code,), daemon=True).start()
        time.sleep(grace_s)
    os._exit(code)
