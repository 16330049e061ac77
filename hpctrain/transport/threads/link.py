"""The Link between threads of one process: P ranks without MPI, for tests, studies and replay.

A send is a rendezvous, as with large MPI messages: the receiver copies straight out of the
sender's array. So a send without a matching receive blocks, as on a cluster; but a wait longer
than `timeout_s` raises, and a rank that fails ends the other ranks' waits.

A thread may be killed in the middle of a call. The others then get the errors of ULFM: see
transport/mpi/fault_tolerance.py.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from hpctrain.core.errors import HungError, LostRankError, RankKilled, TransportError
from hpctrain.core.thresholds import Thresholds
from hpctrain.transport.device import transfers
from hpctrain.transport.pace import Pace
from hpctrain.transport.paths import Path
from hpctrain.transport.threads.hub import AgreementResult, Hub, SentMessage
from hpctrain.transport.threads.native import ThreadCollectives
from hpctrain.transport.threads.requests import Receive, Send
from hpctrain.watch import Entry

T = TypeVar("T")
POLL_S = 2e-5  # polling interval where no condition variable signals


class LocalLink(transfers.QueuedLink):
    """One thread's view of the ranks; see `hpctrain.transport.link.Link`."""

    def __init__(self, hub: Hub, rank: int):
        self.rank, self.size = rank, hub.size
        self.pace: Pace | None = None  # a waiting thread sleeps anyway
        self.hub = hub
        self.pending_receives: dict[int, deque[Receive]] = defaultdict(deque)
        self._splits = 0
        self._groups: Counter[tuple[int, ...]] = Counter()
        self._agreements, self._is_dissolved = 0, False

    def sendrecv(self, x: np.ndarray, dest: int, inbox: np.ndarray, source: int) -> None:
        """Send `x` and fill `inbox`, both at once."""
        receive, send = self.irecv(inbox, source), self.isend(x, dest)
        receive.wait()
        send.wait()

    def wait_any(self, requests: Sequence[Any]) -> int:
        """Return the index of one finished request; it needs no further `wait`."""
        if self.queues is not None:
            return self.queues.wait_any(requests)
        finished: list[int] = []

        def poll() -> bool:
            finished[:] = [i for i, request in enumerate(requests) if request.is_finished()]
            return bool(finished)

        self.wait_until(poll, f"wait_any of {len(requests)} requests")  # polls under the lock
        return finished[0]

    def split(self, color: int, key: int) -> LocalLink:
        """Return the link of the ranks of the same `color`, ordered by `key`; all must call."""
        self._splits += 1
        colors = self.gather_items((color, key))
        members = sorted((k, r) for r, (c, k) in enumerate(colors) if c == color)
        hub = self.hub.child((self._splits, color), [r for _, r in members])
        return self._derive_link(hub, members.index((key, self.rank)), [r for _, r in members])

    def create_group(self, ranks: Sequence[int], tag: int = 0) -> LocalLink:
        """Return the link of `ranks` of this link, in this order; these alone must call."""
        group = (tag, *ranks)
        self._groups[group] += 1  # the members count alike: they call in the same order
        hub = self.hub.child((self._groups[group], *group), ranks)
        return self._derive_link(hub, ranks.index(self.rank), ranks)

    def view(self) -> LocalLink:
        """Return this link for a second thread: of the two, one may only send, one only receive."""
        return self._derive_link(self.hub, self.rank, range(self.size))

    def set_paths(self, paths: Sequence[Path], path_thresholds: Sequence[Thresholds] = ()) -> None:
        """Cut all messages as staged ones, whatever the `paths`: threads have no MPI."""
        staged: Path = "staged"
        self.paths, self.unqueued_type = (staged,) * len(paths), None
        self.path_thresholds = ((),) * len(paths)

    def barrier(self) -> None:
        """Return once every rank has called."""
        self._count_call()
        try:
            self.hub.barrier.wait(self.hub.timeout_s)
        except threading.BrokenBarrierError:
            raise self._wait_error("barrier") from None

    def wait_for(
        self, condition: Callable[[], bool], call: bytes, peer: int = -1, nbytes: int = 0
    ) -> None:
        """Return once `condition()` holds; it is polled, since no condition variable signals it."""
        self._count_call()
        condition = transfers.with_progress(condition)
        deadline_s = time.monotonic() + self.hub.timeout_s
        while not condition():
            if self._is_interrupted() or time.monotonic() > deadline_s:
                raise self._wait_error(call.decode())
            time.sleep(POLL_S)

    def window(self, nbytes: int) -> list[np.ndarray]:
        """Return all ranks' arrays, ours of `nbytes`; threads share memory anyway."""
        return self.gather_items(np.zeros(nbytes, np.uint8))

    @property
    def native(self) -> ThreadCollectives:
        """The collectives of the hub, in place of a library's own."""
        return ThreadCollectives(self)

    def record_waits_in(self, entry: Entry) -> None:
        """Do nothing: waits of threads have a time limit instead of a record."""

    def interrupt_others(self) -> bool:
        """End the other ranks' waits; return True: all are threads."""
        self.hub.fail()
        return True

    def free(self) -> None:
        """Do nothing: a hub is freed with its last link."""

    def message(self, x: np.ndarray) -> np.ndarray:
        """Return the bytes of contiguous `x`."""
        return x.reshape(-1).view(np.uint8)

    def post_send(self, message: np.ndarray, dest: int) -> Send:
        """Start to send bytes; nothing is sent once the link was revoked, as in MPI."""
        self.must_be_open("isend", dest)
        sent = SentMessage(message)
        with self.hub.lock:
            self.hub.mailboxes[self.rank, dest].append(sent)
            self.hub.wakeups[dest].notify_all()
        return Send(self, sent, dest)

    def post_receive(self, message: np.ndarray, source: int) -> Receive:
        """Start to receive bytes."""
        self._count_call()
        request = Receive(self, message, source)
        self.pending_receives[source].append(request)
        return request

    def _derive_link(self, hub: Hub, rank: int, ranks: Sequence[int]) -> LocalLink:
        """Return a link over `hub` between the `ranks` of this link."""
        link = LocalLink(hub, rank)
        if self.paths:
            link.set_paths([self.paths[r] for r in ranks])
        return link

    @property
    def survives(self) -> bool:
        """Whether ranks may be killed, and the others go on."""
        return self.hub.job.survives

    def agree(self) -> None:
        """Return on all ranks that are left, or raise LostRankError on all; see Link."""
        result = self._take_part(1)
        self._is_dissolved = not result.succeeded
        if self._is_dissolved:
            raise self._make_loss("agree")

    def dissolve(self) -> None:
        """Make the pending agreement of the other ranks fail; see Link."""
        if not self._is_dissolved:
            self._take_part(0)
            self._is_dissolved = True

    def revoke(self) -> None:
        """End the waits of all ranks on this link, and on all of the same root."""
        self.hub.revoke()

    def lost_ranks(self) -> list[int]:
        """Return the ranks of this link that were killed."""
        return [self.hub.members.index(member) for member in self.hub.lost_members]

    def shrink(self) -> tuple[LocalLink, list[int]]:
        """Return the link of the ranks that are left, and these ranks; see Link."""
        result = self._take_part(1)
        ranks = [self.hub.members.index(member) for member in result.hub.members]
        return LocalLink(result.hub, ranks.index(self.rank)), ranks

    def _take_part(self, vote: int) -> AgreementResult:
        """Vote in the link's next agreement, and return its result; collective."""
        self._count_call()
        hub, self._agreements = self.hub, self._agreements + 1
        with hub.lock:
            agreement = hub.agreements[self._agreements]
            agreement.votes[hub.members[self.rank]] = vote
            for wakeup in hub.wakeups:
                wakeup.notify_all()
            hub.wakeups[self.rank].wait_for(lambda: agreement.settle(hub), hub.timeout_s)
        if agreement.result is None:
            raise HungError(f"rank {self.rank}: agree: nothing for {hub.timeout_s} s")
        return agreement.result

    def _count_call(self) -> None:
        """Count a call; kill this rank in the call that `kills` names, later its other threads."""
        job, member = self.hub.job, self.hub.members[self.rank]
        if not job.kills:
            return
        job.calls[member] += 1
        if job.calls[member] >= job.kills.get(member, math.inf):
            job.kill(member)
            raise RankKilled

    def _is_interrupted(self, peer: int = -1) -> bool:
        """Return whether a wait for `peer`, or for all ranks, will not end."""
        hub = self.hub
        if hub.failure.is_set() or hub.root.revoked or self._is_killed:
            return True
        lost_members = hub.lost_members
        return bool(lost_members) and (peer < 0 or hub.members[peer] in lost_members)

    def must_be_open(self, call: str, peer: int) -> None:
        """Raise LostRankError if a `call` that waits for `peer` will never end."""
        self._count_call()
        if self._is_interrupted(peer):
            raise self._wait_error(call)

    def wait_until(self, condition: Callable[[], bool], call: str, peer: int = -1) -> None:
        """Wait for `condition()`; raise HungError after the time limit or if a rank failed."""
        self._count_call()
        hub, wakeup = self.hub, self.hub.wakeups[self.rank]
        with hub.lock:
            wakeup.wait_for(lambda: condition() or self._is_interrupted(peer), hub.timeout_s)
            is_complete = condition()
        if not is_complete:
            raise self._wait_error(call)

    def gather_items(self, item: T) -> list[T]:
        """Return the `item` of every rank, in rank order; collective."""
        self.hub.items[self.rank] = item
        self.barrier()
        items = list(self.hub.items)
        self.barrier()
        return items

    def _make_loss(self, call: str) -> LostRankError:
        self.hub.revoke()
        return LostRankError(f"rank {self.rank}: {call}: a rank was lost")

    @property
    def _is_killed(self) -> bool:
        """Whether this rank was killed, perhaps in another of its threads."""
        return self.hub.members[self.rank] in self.hub.job.lost

    def _wait_error(self, call: str) -> BaseException:
        if self._is_killed:
            return RankKilled()
        if self.hub.root.revoked or self.hub.lost_members:
            return self._make_loss(call)
        if self.hub.failure.is_set():
            return TransportError(f"rank {self.rank}: {call}: another rank failed")
        return HungError(f"rank {self.rank}: {call}: nothing for {self.hub.timeout_s} s")
