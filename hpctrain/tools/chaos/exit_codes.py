"""Exit codes that an attempt may have under a fault, if that took place.

With 0 the fault came when the job was over, or it bore it; then the run must be complete.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from hpctrain.tools.chaos import regimes
from hpctrain.tools.chaos.case import Case, FailingFile, Fault, HostFault, LinkCall, Signal

#: exit codes of hpctrain's own, and the status in the summary
STATUS = {0: "done", 1: "failed", 2: "failed", 3: "failed", 75: "stopped", 86: "hung",
          130: "failed"}  # fmt: skip
OWN_LAUNCHERS = ("launch", "elastic", "threads")  #: those that return the exit code of the job
ANY_CODE = frozenset(range(-64, 256))
DONE, LOST = frozenset({0}), frozenset({0, 1})


def allowed_codes(case: Case, faults: Sequence[Fault]) -> frozenset[int]:
    """Return the exit codes that an attempt may have under `faults`."""
    return DONE.union(*(_codes(case, fault) for fault in faults)) if faults else DONE


def _codes(case: Case, fault: Fault) -> frozenset[int]:
    if isinstance(fault, Signal):
        return _codes_of_signal(case, fault)
    if isinstance(fault, HostFault):
        return DONE if fault.effect == "slow" else ANY_CODE
    is_fatal = fault.is_fatal if isinstance(fault, FailingFile) else isinstance(fault, LinkCall)
    return _lost_rank(case) if is_fatal else frozenset({0, 1, 2})


def _lost_rank(case: Case) -> frozenset[int]:
    """Return the codes of a job that loses ranks: an elastic one goes on if enough are left.

    It ends if all ranks that trained are lost, although spares are left.
    """
    if case.is_elastic:
        lost = lost_ranks(case)
        left = min(case.ranks, case.job_ranks - lost)
        return DONE if lost < case.ranks and regimes.fits(case.recipe, left) else LOST
    return LOST if case.launcher in OWN_LAUNCHERS else ANY_CODE


def lost_ranks(case: Case) -> int:
    """Return the number of ranks that the faults of `case` kill, at most.

    A signal to a rank that was lost hits another one in its place.
    """
    signals = [f for f in case.faults if isinstance(f, Signal) and f.target >= 0]
    killed = sum(1 + len(f.others) for f in signals if f.signal in ("SIGKILL", "SIGSTOP"))
    calls = [f for f in case.faults if isinstance(f, LinkCall)]
    threads = {rank for fault in calls for rank in (fault.rank, *fault.others)}
    files = [f for f in case.faults if isinstance(f, FailingFile) and f.is_fatal]
    return killed + len(threads) + len(files)


def _codes_of_signal(case: Case, fault: Signal) -> frozenset[int]:
    launched = case.launcher in OWN_LAUNCHERS
    if fault.is_orphaning:
        return frozenset({-9})
    if fault.target < 0 and not launched and (fault.signal != "SIGUSR1" or fault.step is None):
        return ANY_CODE  # the MPI's launcher decides
    if fault.signal == "SIGKILL":
        return _lost_rank(case) if fault.step is not None or fault.during == "recovery" else LOST
    if fault.signal == "SIGSTOP":
        return frozenset({0, 86}) | (_lost_rank(case) if case.is_elastic else DONE)
    codes = {0, 75, 130} if fault.signal == "SIGINT" else {0, 75}
    if fault.step is None:  # perhaps while Python itself starts: then nothing has begun
        codes |= {-signal.Signals[fault.signal], 1}
    return frozenset(codes)
