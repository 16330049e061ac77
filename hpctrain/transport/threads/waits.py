"""The waits of a rank that is a thread, up to a time limit, and the survivors of a killed one."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from hpctrain.core.errors import HungError, LostRankError, RankKilled, TransportError
from hpctrain.transport.device import transfers
from hpctrain.transport.link import Link
from hpctrain.transport.pace import THREAD_NAP_S, Pace
from hpctrain.transport.threads.hub import AgreementResult, Hub
from hpctrain.watch import Entry

T = TypeVar("T")


class LocalWaits:
    """The waits of a link of threads; see `hpctrain.transport.link.Waits`."""

    entry: Entry  # never read: waits of threads have a time limit instead of a record

    def __init__(self, hub: Hub, rank: int):
        self.hub, self.rank = hub, rank
        self.pace: Pace | None = None  # a waiting thread sleeps anyway

    def barrier(self) -> None:
        """Return once every rank has called."""
        self.count_call()
        try:
            self.hub.barrier.wait(self.hub.timeout_s)
        except threading.BrokenBarrierError:
            raise self.make_error("barrier") from None

    def gather(self, item: T) -> list[T]:
        """Return the `item` of every rank, in rank order; collective."""
        self.hub.items[self.rank] = item
        self.barrier()
        items = list(self.hub.items)
        self.barrier()
        return items

    def wait_for(
        self, condition: Callable[[], bool], call: bytes, peer: int = -1, nbytes: int = 0
    ) -> None:
        """Return once `condition()` holds; it is polled, since no condition variable signals it."""
        self.count_call()
        pace = Pace.of_naps(THREAD_NAP_S, self.hub.timeout_s)
        try:
            pace.until(transfers.with_progress(condition), partial(self._must_go_on, call.decode()))
        except TimeoutError:
            raise self.make_error(call.decode()) from None

    def wait_until(self, condition: Callable[[], bool], call: str, peer: int = -1) -> None:
        """Wait for `condition()`; raise HungError after the time limit or if a rank failed."""
        self.count_call()
        hub, wakeup = self.hub, self.hub.wakeups[self.rank]
        with hub.lock:
            wakeup.wait_for(lambda: condition() or self._is_interrupted(peer), hub.timeout_s)
            is_complete = condition()
        if not is_complete:
            raise self.make_error(call)

    def interrupt_others(self) -> bool:
        """End the other ranks' waits; return True: all are threads."""
        self.hub.fail()
        return True

    def free(self) -> None:
        """Do nothing: a hub is freed with its last link."""

    def count_call(self) -> None:
        """Count a call; kill this rank in the call that `kills` names, later its other threads."""
        job, member = self.hub.job, self.hub.members[self.rank]
        if not job.kills:
            return
        job.calls[member] += 1
        if job.calls[member] >= job.kills.get(member, math.inf):
            job.kill(member)
            raise RankKilled

    def must_be_open(self, call: str, peer: int) -> None:
        """Raise LostRankError if a `call` that waits for `peer` will never end."""
        self.count_call()
        self._must_go_on(call, peer)

    def _must_go_on(self, call: str, peer: int = -1) -> None:
        if self._is_interrupted(peer):
            raise self.make_error(call)

    def _is_interrupted(self, peer: int = -1) -> bool:
        """Return whether a wait for `peer`, or for all ranks, will not end."""
        hub = self.hub
        if hub.job.failure.is_set() or hub.is_revoked or self._is_killed:
            return True
        lost_members = hub.lost_members
        return bool(lost_members) and (peer < 0 or hub.members[peer] in lost_members)

    @property
    def _is_killed(self) -> bool:
        """Whether this rank was killed, perhaps in another of its threads."""
        return self.hub.members[self.rank] in self.hub.job.lost

    def make_loss(self, call: str) -> LostRankError:
        """Return the error of a `call` that a lost rank ended; end all other waits of the root."""
        self.hub.revoke()
        return LostRankError(f"rank {self.rank}: {call}: a rank was lost")

    def make_error(self, call: str) -> BaseException:
        """Return the error of a `call` that did not complete."""
        if self._is_killed:
            return RankKilled()
        if self.hub.is_revoked or self.hub.lost_members:
            return self.make_loss(call)
        if self.hub.job.failure.is_set():
            return TransportError(f"rank {self.rank}: {call}: another rank failed")
        return HungError(f"rank {self.rank}: {call}: nothing for {self.hub.timeout_s} s")


class LocalSurvivors:
    """The ranks of a link of threads that are left; see `hpctrain.transport.link.Survivors`."""

    def __init__(self, waits: LocalWaits, make_link: Callable[[Hub, int], Link]):
        """`make_link` makes the link of a rank of the survivors' hub."""
        self.hub, self._waits, self._make_link = waits.hub, waits, make_link
        self._agreements, self._is_dissolved = 0, False

    @property
    def survives(self) -> bool:
        """Whether ranks may be killed, and the others go on."""
        return self.hub.job.survives

    def agree(self) -> None:
        """Return on all ranks that are left, or raise LostRankError on all; see Survivors."""
        result = self._take_part(1)
        self._is_dissolved = not result.succeeded
        if self._is_dissolved:
            raise self._waits.make_loss("agree")

    def dissolve(self) -> None:
        """Make the pending agreement of the other ranks fail; see Survivors."""
        if not self._is_dissolved:
            self._take_part(0)
            self._is_dissolved = True

    def revoke(self) -> None:
        """End the waits of all ranks on this link, and on all of the same root."""
        self.hub.revoke()

    def lost_ranks(self) -> list[int]:
        """Return the ranks of this link that were killed."""
        return [self.hub.members.index(member) for member in self.hub.lost_members]

    def shrink(self) -> tuple[Link, list[int]]:
        """Return the link of the ranks that are left, and these ranks; see Survivors."""
        result = self._take_part(1)
        ranks = [self.hub.members.index(member) for member in result.hub.members]
        return self._make_link(result.hub, ranks.index(self._waits.rank)), ranks

    def _take_part(self, vote: int) -> AgreementResult:
        """Vote in the link's next agreement, and return its result; collective."""
        self._waits.count_call()
        hub, rank = self.hub, self._waits.rank
        self._agreements += 1
        with hub.lock:
            agreement = hub.agreements[self._agreements]
            agreement.votes[hub.members[rank]] = vote
            for wakeup in hub.wakeups:
                wakeup.notify_all()
            hub.wakeups[rank].wait_for(lambda: agreement.settle(hub), hub.timeout_s)
        if agreement.result is None:
            raise HungError(f"rank {rank}: agree: nothing for {hub.timeout_s} s")
        return agreement.result
