"""Reports of lost processes to Open MPI: a host that is dead, a process that SIGKILL does not end.

Open MPI notices the end of a process where its daemon does, on the same host. If a whole host is
off or cut from the network, every call waits, until the launcher ends the job, after 484 s by
default (docs/reliability.md). So a rank that knows reports the lost processes by an event of PMIx,
as Open MPI's own failure detector does, with the range of the whole job. Within milliseconds calls
raise ERR_PROC_FAILED on all ranks left, and Shrink works.

PMIx is a public interface with a stable layout; the library is the one that Open MPI has loaded.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from hpctrain.core.errors import TransportError

_PROCESS_LOST = -200  # PMIX_ERR_PROC_TERM_WO_SYNC
_AFFECTED_PROCESS_KEY, _PROCESS_TYPE, _NAMESPACE_RANGE = b"pmix.evproc", 22, 3
_SUCCESSES = (0, -157)  # the second: the operation is complete, and no callback follows
_MAPS = Path("/proc/self/maps")


class _PmixProcess(ctypes.Structure):
    _fields_ = (("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _PmixData(ctypes.Union):
    _fields_ = (("process", ctypes.POINTER(_PmixProcess)), ("size", ctypes.c_char * 24))


class _PmixValue(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("data", _PmixData))


class _PmixInfo(ctypes.Structure):
    _fields_ = (("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _PmixValue))


def report_lost_processes(job_ranks: Sequence[int]) -> None:
    """Let Open MPI on the surviving ranks count `job_ranks`, in MPI_COMM_WORLD, as failed.

    Callable from any thread. Raises TransportError where the job has no PMIx, or refuses the event.
    """
    pmix, namespace = _load_pmix(), os.environ.get("PMIX_NAMESPACE", "").encode()
    source = _PmixProcess(namespace, int(os.environ["PMIX_RANK"]))
    for rank in job_ranks:
        lost_process = _PmixProcess(namespace, rank)
        info = _PmixInfo(
            _AFFECTED_PROCESS_KEY,
            0,
            _PmixValue(_PROCESS_TYPE, _PmixData(ctypes.pointer(lost_process))),
        )
        result = pmix.PMIx_Notify_event(
            _PROCESS_LOST,
            ctypes.byref(source),
            ctypes.c_uint8(_NAMESPACE_RANGE),
            ctypes.byref(info),
            ctypes.c_size_t(1),
            None,
            None,
        )
        if result not in _SUCCESSES:
            raise TransportError(
                f"the loss of rank {rank} could not be reported to Open MPI: PMIx_Notify_event "
                f"returned {result}"
            )


def _load_pmix() -> ctypes.CDLL:
    """Return the PMIx library of this process; one that was loaded by path has another name."""
    paths = {line.split(maxsplit=5)[5].strip() for line in _MAPS.open() if "libpmix.so" in line}
    if not paths or "PMIX_RANK" not in os.environ:
        raise TransportError(
            "lost ranks are reported to Open MPI by PMIx, which this process has not loaded: start "
            "the job with Open MPI's mpirun"
        )
    return ctypes.CDLL(paths.pop())
