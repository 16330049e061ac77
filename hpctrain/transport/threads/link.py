"""The Link between threads of one process: P ranks without MPI, for tests, studies and replay.

A send is a rendezvous, as with large MPI messages: the receiver copies straight out of the
sender's array. So a send without a matching receive blocks, as on a cluster; but a wait longer
than `timeout_s` raises, and a rank that fails ends the other ranks' waits.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np

from hpctrain.core.errors import HungError, TransportError
from hpctrain.core.thresholds import Thresholds
from hpctrain.transport.device import transfers
from hpctrain.transport.link import Request
from hpctrain.transport.paths import Path
from hpctrain.transport.threads.hub import Hub, SentMessage
from hpctrain.transport.threads.native import ThreadCollectives
from hpctrain.watch import Entry

T = TypeVar("T")
POLL_S = 2e-5  # polling interval where no condition variable signals
GRACE_S = 0.5  # between the first rank that fails and the end of the others' waits


class LocalLink:
    """One thread's view of the ranks; see `hpctrain.transport.link.Link`."""

    def __init__(self, hub: Hub, rank: int):
        self.rank, self.size = rank, hub.size
        self.bytes_sent = self.messages_sent = self.host_bytes = 0
        self.sleeps_while_waiting = True  # a waiting thread sleeps
        self.unqueued_type: type | None = np.ndarray
        self.paths: tuple[Path, ...] = ()
        self.path_thresholds: tuple[Thresholds, ...] = ()
        self.queues: transfers.TransferQueues | None = None
        self.hub = hub
        self.pending_receives: dict[int, deque[_Receive]] = defaultdict(deque)
        self._splits = 0
        self._groups: Counter[tuple[int, ...]] = Counter()

    def isend(self, x: np.ndarray, dest: int) -> Request:
        """Start to send `x` to rank `dest`."""
        if type(x) is not self.unqueued_type:
            return transfers.queues_for(self).isend(x, dest)
        self.count_message(x.nbytes)
        return self.post_send(self.message(x), dest)

    def irecv(self, x: np.ndarray, source: int) -> Request:
        """Start to fill `x` from rank `source`."""
        if type(x) is not self.unqueued_type:
            return transfers.queues_for(self).irecv(x, source)
        return self.post_receive(self.message(x), source)

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
        hub = self.hub.child((self._splits, color), len(members))
        return self._derive_link(hub, members.index((key, self.rank)), [r for _, r in members])

    def create_group(self, ranks: Sequence[int], tag: int = 0) -> LocalLink:
        """Return the link of `ranks` of this link, in this order; these alone must call."""
        group = (tag, *ranks)
        self._groups[group] += 1  # the members count alike: they call in the same order
        hub = self.hub.child((self._groups[group], *group), len(ranks))
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
        try:
            self.hub.barrier.wait(self.hub.timeout_s)
        except threading.BrokenBarrierError:
            raise self._wait_error("barrier") from None

    def wait_for(
        self, condition: Callable[[], bool], call: bytes, peer: int = -1, nbytes: int = 0
    ) -> None:
        """Return once `condition()` holds; it is polled, since no condition variable signals it."""
        condition = transfers.with_progress(condition)
        deadline_s = time.monotonic() + self.hub.timeout_s
        while not condition():
            if self.hub.failure.is_set() or time.monotonic() > deadline_s:
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

    def count_message(self, nbytes: int) -> None:
        """Count a message of `nbytes`."""
        self.bytes_sent += nbytes
        self.messages_sent += 1

    def message(self, x: np.ndarray) -> np.ndarray:
        """Return the bytes of contiguous `x`."""
        return x.reshape(-1).view(np.uint8)

    def post_send(self, message: np.ndarray, dest: int) -> _Send:
        """Start to send bytes."""
        sent = SentMessage(message)
        with self.hub.lock:
            self.hub.mailboxes[self.rank, dest].append(sent)
            self.hub.wakeups[dest].notify_all()
        return _Send(self, sent, dest)

    def post_receive(self, message: np.ndarray, source: int) -> _Receive:
        """Start to receive bytes."""
        request = _Receive(self, message, source)
        self.pending_receives[source].append(request)
        return request

    def _derive_link(self, hub: Hub, rank: int, ranks: Sequence[int]) -> LocalLink:
        """Return a link over `hub` between the `ranks` of this link."""
        link = LocalLink(hub, rank)
        if self.paths:
            link.set_paths([self.paths[r] for r in ranks])
        return link

    def wait_until(self, condition: Callable[[], bool], call: str) -> None:
        """Wait for `condition()`; raise HungError after the time limit or if a rank failed."""
        hub, wakeup = self.hub, self.hub.wakeups[self.rank]
        with hub.lock:
            wakeup.wait_for(lambda: condition() or hub.failure.is_set(), hub.timeout_s)
            if not condition():
                raise self._wait_error(call)

    def gather_items(self, item: T) -> list[T]:
        """Return the `item` of every rank, in rank order; collective."""
        self.hub.items[self.rank] = item
        self.barrier()
        items = list(self.hub.items)
        self.barrier()
        return items

    def _wait_error(self, call: str) -> Exception:
        if self.hub.failure.is_set():
            return TransportError(f"rank {self.rank}: {call}: another rank failed")
        return HungError(f"rank {self.rank}: {call}: nothing for {self.hub.timeout_s} s")


class _Send:
    def __init__(self, link: LocalLink, message: SentMessage, peer: int):
        self._link, self._message, self._peer = link, message, peer

    def is_finished(self) -> bool:
        return self._message.done

    def done(self) -> bool:
        return self._message.done

    def wait(self) -> None:
        call = f"isend of {self._message.x.nbytes} bytes to rank {self._peer}"
        self._link.wait_until(self.is_finished, call)


class _Receive:
    def __init__(self, link: LocalLink, x: np.ndarray, source: int):
        self._link, self._x, self._source, self._done = link, x, source, False

    def is_finished(self) -> bool:
        """Complete receives from this source in the order in which they were posted."""
        link = self._link
        mailbox, pending = (
            link.hub.mailboxes[self._source, link.rank],
            link.pending_receives[self._source],
        )
        while mailbox and pending and not self._done:
            pending.popleft()._receive_message(mailbox.popleft())
        return self._done

    def done(self) -> bool:
        with self._link.hub.lock:
            return self.is_finished()

    def wait(self) -> None:
        call = f"irecv of {self._x.nbytes} bytes from rank {self._source}"
        self._link.wait_until(self.is_finished, call)

    def _receive_message(self, message: SentMessage) -> None:
        if message.x.nbytes != self._x.nbytes:
            raise TransportError(
                f"rank {self._link.rank}: irecv from rank {self._source} expected "
                f"{self._x.nbytes} bytes, {message.x.nbytes} came"
            )
        self._x[...] = message.x
        self._done = message.done = True
        self._link.hub.wakeups[self._source].notify_all()


def run_ranks(size: int, function: Callable[[LocalLink], T], timeout_s: float = 60.0) -> list[T]:
    """Run `function(link)` as `size` ranks, each a thread; return the results in rank order.

    The error of the first rank that raises is raised here. The other ranks have GRACE_S to end by
    themselves, since ranks may agree to fail together; then their waits are ended.
    """
    hub = Hub(size, timeout_s, threading.Event())
    results: list[Any] = [None] * size
    outcomes: SimpleQueue[BaseException | None] = SimpleQueue()

    def run_rank(rank: int) -> None:
        try:
            results[rank] = function(LocalLink(hub, rank))
            outcomes.put(None)
        except BaseException as error:  # raised again below
            outcomes.put(error)

    for rank in range(size):
        threading.Thread(target=run_rank, args=(rank,), daemon=True).start()
    if (error := _first_error(outcomes, hub)) is not None:
        raise error
    return results


def _first_error(outcomes: SimpleQueue[BaseException | None], hub: Hub) -> BaseException | None:
    """Wait for all ranks; return the error of the first that failed, or None."""
    first_error = None
    for _ in range(hub.size):
        try:
            error = outcomes.get(timeout=None if first_error is None else GRACE_S)
        except Empty:
            hub.fail()
            error = outcomes.get()
        first_error = first_error or error
    return first_error
