"""Per-peer FIFO queues of transfers that MPI cannot make by itself.

    to rank 1      [ GPU array, staged: 3 of 8 segments sent ][ header in host memory ][ ... ]
    from rank 1    [ GPU array, staged: 2 of 8 segments arrived ]

A link makes its queues at the first array of a GPU, or at `set_paths`, which gives it the `paths`
to its peers; from then on all its messages go through them. A message is posted after those before
it in its queue, so that sends and receives match. Its cuts depend on its length and on the path
between the two ranks alone: one side may lie on a GPU, the other in host memory.

There is no progress thread: all transfers of a thread, on any of its links, advance while it waits
for one of them (`advance`).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, namespace
from hpctrain.transport.device.direct_transfer import (
    DirectTransfer,
    PostedMessage,
    Transfer,
    TransferLink,
)
from hpctrain.transport.device.staging import Receiving, Sending, segments
from hpctrain.transport.paths import by_pointer

NAP_S = 50e-6  # of a link that sleeps while it waits, after a poll without progress


class _ThreadQueues(threading.local):
    def __init__(self) -> None:
        self.busy: set[TransferQueues] = set()  # queues with transfers of this thread


_thread = _ThreadQueues()


def advance() -> int:
    """Advance all transfers of this thread; return the number of steps done."""
    return sum(queues.advance() for queues in tuple(_thread.busy))


def with_progress(ready: Callable[[], bool], sleeps: bool = False) -> Callable[[], bool]:
    """Return `ready`, extended to advance the transfers of this thread, if it has any.

    `sleeps`: it sleeps after a poll without progress.
    """
    if not _thread.busy:
        return ready

    def look() -> bool:
        if not advance() and sleeps:
            time.sleep(NAP_S)
        return ready()

    return look


def queues_of(link: TransferLink) -> TransferQueues:
    """Return the queues of `link`, made on first use."""
    if link.queues is None:
        link.queues = TransferQueues(link)
    return link.queues


def must_be_on_current_device(x: Array) -> None:
    """Raise UsageError unless the device array `x` is contiguous and on the current device."""
    xp = namespace(x)
    if xp is np:
        raise UsageError(f"expected an array of NumPy or CuPy, seen {type(x).__name__}")
    device = xp.cuda.runtime.getDevice()
    if x.data.device_id != device:
        raise UsageError(
            f"expected an array on this rank's GPU {device}, seen one on GPU {x.data.device_id}: "
            "make the GPU current before you make arrays, as ht.init() does"
        )
    if not x.flags.c_contiguous:
        raise UsageError(f"expected a contiguous array, seen strides {x.strides} of {x.shape}")


def _must_be_sendable(x: Array) -> None:
    """Raise UsageError unless `x` lies in host memory or on the current device."""
    if not isinstance(x, np.ndarray):
        must_be_on_current_device(x)


class TransferQueues:
    """All queues of one link; used by one thread at a time, like the link."""

    def __init__(self, link: TransferLink):
        self._link = link
        self._queues: dict[tuple[str, int], deque[Any]] = defaultdict(deque)

    def isend(self, x: Array, to: int) -> TransferRequest:
        """Start to send `x` to rank `to`."""
        transfer = self._transfer(x, to, self._link.post_send, Sending)
        self._link.count(x.nbytes)
        return self._begin("to", to, transfer, 0)

    def irecv(self, x: Array, source: int) -> TransferRequest:
        """Start to fill `x` from rank `source`."""
        transfer = self._transfer(x, source, self._link.post_receive, Receiving)
        return self._begin("from", source, transfer, x.nbytes)

    def sendrecv(self, x: Array, to: int, inbox: Array, source: int) -> None:
        """Send `x` and fill `inbox`, both at once."""
        for array in (x, inbox):
            _must_be_sendable(array)  # before any post: a caller that catches this may go on
        receive, send = self.irecv(inbox, source), self.isend(x, to)
        receive.wait()
        send.wait()

    def wait_any(self, requests: Sequence[Any]) -> int:
        """Return the index of one finished request, which needs no further `wait`."""
        finished: list[int] = []

        def look() -> bool:
            finished[:] = [i for i, request in enumerate(requests) if request.done()][:1]
            return bool(finished)

        self._link.wait_for(look, b"wait_any")
        requests[finished[0]].wait()
        return finished[0]

    def advance(self) -> int:
        """Advance all transfers; return the number of steps done."""
        steps = sum(map(_advance, self._queues.values()))
        for key in [key for key, queue in self._queues.items() if not queue]:
            del self._queues[key]
        if not self._queues:
            _thread.busy.discard(self)
        return steps

    def wait(self, transfer: Any, call: bytes, peer: int, nbytes: int) -> None:
        """Return once `transfer` is done."""
        _thread.busy.add(self)  # it may have been begun by another thread, which has ended
        if (
            type(transfer) is DirectTransfer
            and transfer.posted
            and self._is_only_transfer(transfer)
        ):
            transfer.wait()
        elif not transfer.done:
            self._link.wait_for(lambda: transfer.done, call, peer, nbytes)
        self.advance()
        transfer.finish()

    def _begin(
        self, direction: str, peer: int, transfer: Transfer, expected: int
    ) -> TransferRequest:
        queue = self._queues[direction, peer]
        queue.append(transfer)
        _thread.busy.add(self)
        _advance(queue)
        return TransferRequest(self, transfer, direction, peer, expected)

    def _transfer(
        self, x: Array, peer: int, post: Callable[[Any, int], PostedMessage], staged: type
    ) -> Any:
        link = self._link
        _must_be_sendable(x)
        on_gpu = not isinstance(x, np.ndarray)
        if on_gpu:
            link.unqueued_type = None  # later messages must not overtake this one
        pointer = self._by_pointer(peer, x.nbytes)
        if on_gpu and not pointer:
            return staged(x, lambda buffer: self._posted(post, buffer, peer))
        is_sent_whole = pointer or not link.paths
        pieces = [x] if is_sent_whole else cut_as_staged(x)
        return DirectTransfer(x, [partial(post, link.message(piece), peer) for piece in pieces])

    def _by_pointer(self, peer: int, nbytes: int) -> bool:
        link = self._link
        return bool(link.paths) and by_pointer(link.paths[peer], link.by_size[peer], nbytes)

    def _posted(
        self, post: Callable[[Any, int], PostedMessage], buffer: np.ndarray, peer: int
    ) -> PostedMessage:
        self._link.host_bytes += buffer.nbytes
        return post(self._link.message(buffer), peer)

    def _is_only_transfer(self, transfer: Any) -> bool:
        """Return whether this thread has nothing but `transfer` under way."""
        queues = list(self._queues.values())
        return _thread.busy <= {self} and len(queues) == 1 and list(queues[0]) == [transfer]


class TransferRequest:
    """A transfer in a queue; see `hpctrain.transport.link.Request`."""

    def __init__(
        self, queues: TransferQueues, transfer: Transfer, direction: str, peer: int, expected: int
    ):
        self._queues, self._transfer = queues, transfer
        self._direction, self._peer, self._expected = direction, peer, expected

    def done(self) -> bool:
        """Return whether the transfer is done, without advancing it."""
        return self._transfer.done

    def wait(self) -> None:
        """Return when the transfer is done, as the current stream sees it."""
        call = b"wait for isend" if self._direction == "to" else b"wait for irecv"
        self._queues.wait(self._transfer, call, self._peer, self._expected)


def cut_as_staged(x: np.ndarray) -> Iterator[np.ndarray]:
    """Yield contiguous `x`, in host memory, in the segments of a staged message."""
    flat = x.reshape(-1).view(np.uint8)
    for start, nbytes in segments(x.nbytes):
        yield flat[start : start + nbytes]


def _advance(queue: deque[Any]) -> int:
    """Advance the transfers of one queue; one may be posted after those before it."""
    steps, may_post = 0, True
    for transfer in tuple(queue):
        try:
            steps += transfer.advance(may_post)
        except BaseException:
            queue.remove(transfer)  # a caller that catches this may go on
            raise
        may_post = may_post and transfer.posted
    while queue and queue[0].done:
        queue.popleft()
    return steps
