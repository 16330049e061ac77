"""A wait for a rank that has ended its script: a hang that is known within seconds.

    rank 0   step 15 | all_reduce ...      waits for rank 1
    rank 1   step 15 | end of the script   waits for rank 0, and sends nothing more

So long as a rank of the node computes, it may let the others go on: they may be a group without the
rank that has ended. If each rank waits or has ended, and no wait changes, none will. The same holds
where the main threads of some ranks wait for gradients, and other ranks wait in another call:

    rank 0   step 15 | backward ...        waits for rank 1
    rank 1   step 15 | ht.allreduce ...    waits for rank 0
"""

from __future__ import annotations

from collections.abc import Sequence
from time import time as clock

from hpctrain.watch.layout import Snapshot
from hpctrain.watch.report import HungReport, make_ended_report

LIMIT_S, LIMIT_S_PER_BYTE = 5.0, 1e-8  #: without a change; a long array takes its time
#: The main thread of a loop of the user's own waits for gradients, and in other calls.
GRADIENTS, GRADIENTS_CALL, MAIN = "sync", b"ht.torch.sync backward", "main"
_SILENT_S = 3.0  # three heartbeats: such a rank may be stopped, and go on later


class EndedRanks:
    """The waits of a node at the last beats, as one rank's watch observes them."""

    def __init__(self) -> None:
        self._waits: tuple[tuple[int, str, float], ...] = ()
        self._since_s = 0.0

    def check(self, snapshots: Sequence[Snapshot], rank: int, awake_s: float) -> HungReport | None:
        """Return a report once, from the first of the ranks that wait in vain; else None.

        `awake_s`: the time that this process has been awake.
        """
        waiting = [snapshot for snapshot in snapshots if not snapshot.has_ended]
        is_hopeless = len(waiting) < len(snapshots) or _are_mismatched(waiting)
        waits = _waits(waiting) if is_hopeless else ()
        if waits != self._waits:
            self._waits, self._since_s = waits, awake_s
        if not waits or waiting[0].rank != rank:
            return None
        nbytes = max(call.nbytes for snapshot in waiting for call in snapshot.waiting_calls)
        if awake_s - self._since_s < LIMIT_S + LIMIT_S_PER_BYTE * nbytes:
            return None
        self._since_s = float("inf")
        ended = [snapshot for snapshot in snapshots if snapshot.has_ended]
        return make_ended_report(ended, waiting, clock())


def _are_mismatched(snapshots: Sequence[Snapshot]) -> bool:
    """Return whether all main threads wait, in different calls, and some for gradients."""
    calls_of_ranks = {
        frozenset(
            (call.thread, call.operation == GRADIENTS_CALL.decode())
            for call in snapshot.waiting_calls
            if call.thread in (MAIN, GRADIENTS)
        )
        for snapshot in snapshots
    }
    threads = {thread for waits in calls_of_ranks for thread, _ in waits}
    return len(calls_of_ranks) > 1 and frozenset() not in calls_of_ranks and GRADIENTS in threads


def _waits(snapshots: Sequence[Snapshot]) -> tuple[tuple[int, str, float], ...]:
    """Return every rank's wait, or nothing if any rank computes or is silent."""
    now_s = clock()
    if any(not s.waiting_calls or now_s - s.heartbeat > _SILENT_S for s in snapshots):
        return ()
    return tuple((s.rank, call.thread, call.start_s) for s in snapshots for call in s.waiting_calls)
