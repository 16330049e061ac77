"""Per-peer FIFO queues of GPU transfers, staged or by pointer.

    to rank 1      [ GPU array, staged: 3 of 8 segments sent ][ header in host memory ][ ... ]
    from rank 1    [ GPU array, staged: 2 of 8 segments arrived ]

A link makes its queues at the first GPU array, or at `set_paths`, which sets the paths to peers;
from then on all its messages go through the queues. The messages of a queue are posted in order, so
that sends and receives match. The cuts of a message depend only on its length and on the path
between the two ranks: one side may be on a GPU, the other in host memory.

There is no progress thread: a thread that waits for one transfer advances its transfers on every
link (`advance_thread_transfers`).
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
from hpctrain.transport.device.direct_transfer import DirectTransfer
from hpctrain.transport.device.staging import StagedReceive, StagedSend, cut_segments
from hpctrain.transport.link import Endpoint, Request, Traffic
from hpctrain.transport.pace import Pace
from hpctrain.transport.paths import sends_by_pointer

Transfer = DirectTransfer | StagedSend | StagedReceive


class _ThreadQueues(threading.local):
    def __init__(self) -> None:
        self.active_queues: set[TransferQueues] = set()  # queues with transfers of this thread


_thread_state = _ThreadQueues()


def advance_thread_transfers() -> int:
    """Advance all transfers of this thread; return the number of steps done."""
    return sum(queues.advance() for queues in tuple(_thread_state.active_queues))


def with_progress(condition: Callable[[], bool], pace: Pace | None = None) -> Callable[[], bool]:
    """Return `condition`, extended to advance the transfers of this thread, if any.

    With a `pace` the extended condition naps after a poll without progress.
    """
    if not _thread_state.active_queues:
        return condition

    def poll() -> bool:
        if not advance_thread_transfers() and pace is not None:
            time.sleep(pace.min_nap_s)
        return condition()

    return poll


class QueuedLink:
    """The sends and receives of a link, which go through its queues for GPU arrays."""

    endpoint: Endpoint
    message: Callable[[Array], Any]  #: returns the form in which the wire takes an array
    post_send: Callable[[Any, int], Request]  #: (message, rank) starts to send
    post_receive: Callable[[Any, int], Request]
    _traffic: Traffic  # of the endpoint
    _queues: TransferQueues | None = None

    def isend(self, x: np.ndarray, dest: int) -> Request:
        """Start to send `x` to rank `dest`."""
        traffic = self._traffic
        if type(x) is not traffic.unqueued_type:
            return self._in_queues().isend(x, dest)
        traffic.count(x.nbytes)
        return self.post_send(self.message(x), dest)

    def irecv(self, x: np.ndarray, source: int) -> Request:
        """Start to fill `x` from rank `source`."""
        if type(x) is not self._traffic.unqueued_type:
            return self._in_queues().irecv(x, source)
        return self.post_receive(self.message(x), source)

    def _in_queues(self) -> TransferQueues:
        """Return the queues of this link, made on first use."""
        if self._queues is None:
            self._queues = TransferQueues(self)
        return self._queues


def require_current_device(x: Array) -> None:
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


def _require_sendable(x: Array) -> None:
    """Raise UsageError unless `x` lies in host memory or on the current device."""
    if not isinstance(x, np.ndarray):
        require_current_device(x)


class TransferQueues:
    """The transfer queues of a link; used by one thread at a time, like the link."""

    def __init__(self, link: QueuedLink):
        self._link, self._traffic, self._waits = link, link.endpoint.traffic, link.endpoint.waits
        self._queues: dict[tuple[str, int], deque[Any]] = defaultdict(deque)

    def isend(self, x: Array, dest: int) -> TransferRequest:
        """Start to send `x` to rank `dest`."""
        transfer = self._transfer(x, dest, self._link.post_send, StagedSend)
        self._traffic.count(x.nbytes)
        return self._enqueue("to", dest, transfer, 0)

    def irecv(self, x: Array, source: int) -> TransferRequest:
        """Start to fill `x` from rank `source`."""
        transfer = self._transfer(x, source, self._link.post_receive, StagedReceive)
        return self._enqueue("from", source, transfer, x.nbytes)

    def sendrecv(self, x: Array, dest: int, inbox: Array, source: int) -> None:
        """Send `x` and fill `inbox`, both at once."""
        for array in (x, inbox):
            _require_sendable(array)  # before any post: callers may catch the error and continue
        receive, send = self.irecv(inbox, source), self.isend(x, dest)
        receive.wait()
        send.wait()

    def wait_any(self, requests: Sequence[Any]) -> int:
        """Return the index of one finished request; it needs no further `wait`."""
        finished: list[int] = []

        def poll() -> bool:
            finished[:] = [i for i, request in enumerate(requests) if request.done()][:1]
            return bool(finished)

        self._waits.wait_for(poll, b"wait_any")
        requests[finished[0]].wait()
        return finished[0]

    def advance(self) -> int:
        """Advance all transfers; return the number of steps done."""
        steps = sum(map(_advance_queue, self._queues.values()))
        for key in [key for key, queue in self._queues.items() if not queue]:
            del self._queues[key]
        if not self._queues:
            _thread_state.active_queues.discard(self)
        return steps

    def wait(self, transfer: Any, call: bytes, peer: int, nbytes: int) -> None:
        """Return once `transfer` is done."""
        # A thread that has ended may have begun the transfer.
        _thread_state.active_queues.add(self)
        if (
            type(transfer) is DirectTransfer
            and transfer.is_posted
            and self._is_only_transfer(transfer)
        ):
            transfer.wait()
        elif not transfer.done:
            self._waits.wait_for(lambda: transfer.done, call, peer, nbytes)
        self.advance()
        transfer.finish()

    def _enqueue(
        self, direction: str, peer: int, transfer: Transfer, expected_bytes: int
    ) -> TransferRequest:
        queue = self._queues[direction, peer]
        queue.append(transfer)
        _thread_state.active_queues.add(self)
        _advance_queue(queue)
        return TransferRequest(self, transfer, direction, peer, expected_bytes)

    def _transfer(
        self, x: Array, peer: int, post: Callable[[Any, int], Request], staged_type: type
    ) -> Any:
        link, traffic = self._link, self._traffic
        _require_sendable(x)
        on_gpu = not isinstance(x, np.ndarray)
        if on_gpu:
            traffic.unqueued_type = None  # later messages must not overtake this one
        uses_pointer = bool(traffic.paths) and sends_by_pointer(
            traffic.paths[peer], traffic.path_thresholds[peer], x.nbytes
        )
        if on_gpu and not uses_pointer:
            return staged_type(x, lambda buffer: self._post_staged(post, buffer, peer))
        is_sent_whole = uses_pointer or not traffic.paths
        pieces = [x] if is_sent_whole else cut_into_segments(x)
        return DirectTransfer(x, [partial(post, link.message(piece), peer) for piece in pieces])

    def _post_staged(
        self, post: Callable[[Any, int], Request], buffer: np.ndarray, peer: int
    ) -> Request:
        self._traffic.host_bytes += buffer.nbytes
        return post(self._link.message(buffer), peer)

    def _is_only_transfer(self, transfer: Any) -> bool:
        """Return whether `transfer` is the only pending transfer of this thread."""
        queues = list(self._queues.values())
        return (
            _thread_state.active_queues <= {self}
            and len(queues) == 1
            and list(queues[0]) == [transfer]
        )


class TransferRequest:
    """A transfer in a queue; see `hpctrain.transport.link.Request`."""

    def __init__(
        self,
        queues: TransferQueues,
        transfer: Transfer,
        direction: str,
        peer: int,
        expected_bytes: int,
    ):
        self._queues, self._transfer = queues, transfer
        self._direction, self._peer, self._expected_bytes = direction, peer, expected_bytes

    def done(self) -> bool:
        """Return whether the transfer is done, without advancing it."""
        return self._transfer.done

    def wait(self) -> None:
        """Return when the transfer is done; later work of the current stream sees the data."""
        call = b"wait for isend" if self._direction == "to" else b"wait for irecv"
        self._queues.wait(self._transfer, call, self._peer, self._expected_bytes)


def cut_into_segments(x: np.ndarray) -> Iterator[np.ndarray]:
    """Yield contiguous `x`, in host memory, in the segments of a staged message."""
    flat = x.reshape(-1).view(np.uint8)
    for start, nbytes in cut_segments(x.nbytes):
        yield flat[start : start + nbytes]


def _advance_queue(queue: deque[Any]) -> int:
    """Advance the transfers of a queue; a transfer is posted after all earlier ones."""
    steps, may_post = 0, True
    for transfer in tuple(queue):
        try:
            steps += transfer.advance(may_post)
        except BaseException:
            queue.remove(transfer)  # callers may catch the error and continue
            raise
        may_post = may_post and transfer.is_posted
    while queue and queue[0].done:
        queue.popleft()
    return steps
