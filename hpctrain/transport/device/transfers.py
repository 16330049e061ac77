"""Per-peer FIFO queues ("lanes") of transfers that MPI cannot make by itself.

    to rank 1      [ GPU array, staged: 3 of 8 segments sent ][ header in host memory ][ ... ]
    from rank 1    [ GPU array, staged: 2 of 8 segments arrived ]

A link makes its lanes at the first array of a GPU, or at `take`, which gives it the `paths` to its
peers; from then on all its messages go through them. A message is posted after those before it in
its lane, so that sends and receives match. Its cuts depend on its length and on the path between
the two ranks alone: one side may lie on a GPU, the other in host memory.

There is no progress thread: all transfers of a thread, on any of its links, advance while it waits
for one of them (`advance`).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.thresholds import Thresholds
from hpctrain.core.xp import Array, namespace
from hpctrain.transport.device.staging import Posted, Receiving, Sending, spans
from hpctrain.transport.paths import Path, by_pointer

NAP_S = 50e-6  # of a patient link, after a poll without progress


class Message(Posted, Protocol):
    """A message posted to the wire."""

    def wait(self) -> None:
        """Return once it is complete; raise TransportError if the sizes differ."""


class Wire(Protocol):
    """The part of a link that lanes use."""

    rank: int
    size: int
    host: type | None
    host_bytes: int
    paths: tuple[Path, ...]
    by_size: tuple[Thresholds, ...]
    lanes: Lanes | None

    def count(self, nbytes: int) -> None: ...

    def message(self, x: Array) -> Any: ...

    def post_send(self, message: Any, to: int) -> Message: ...

    def post_receive(self, message: Any, source: int) -> Message: ...

    def wait_for(
        self, ready: Callable[[], bool], call: bytes, peer: int = -1, nbytes: int = 0
    ) -> None: ...


class Transfer(Protocol):
    """An entry of a lane."""

    @property
    def posted(self) -> bool: ...

    @property
    def done(self) -> bool: ...

    def advance(self, turn: bool) -> int: ...

    def finish(self) -> None: ...


class Plain:
    """Messages that the wire takes as they are, in pieces that are posted together."""

    def __init__(self, x: Array, posts: Sequence[Callable[[], Message]]):
        """Send or fill `x` by `posts`; holds a reference to `x`, since MPI has its address only."""
        self._x, self._posts, self.posted = x, posts, False
        self._under_way: deque[Message] = deque()

    @property
    def done(self) -> bool:
        """Whether all pieces are complete."""
        return self.posted and not self._under_way

    def advance(self, turn: bool) -> int:
        """Return the number of steps done; `turn`: the messages may be posted."""
        steps = 0
        if turn and not self.posted:
            self._under_way.extend(post() for post in self._posts)
            self.posted, steps = True, 1
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
            steps += 1
        return steps

    def wait(self) -> None:
        """Wait by the wire's own blocking call, where nothing else is under way."""
        while self._under_way:
            self._under_way.popleft().wait()

    def finish(self) -> None:
        """Do nothing: host memory, and device memory that MPI writes, can be read now."""


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.busy: set[Lanes] = set()  # lanes with transfers of this thread


_thread = _ThreadState()


def advance() -> int:
    """Advance all transfers of this thread; return the number of steps done."""
    return sum(lanes.advance() for lanes in tuple(_thread.busy))


def kept_going(ready: Callable[[], bool], patient: bool = False) -> Callable[[], bool]:
    """Return `ready`, extended to advance the transfers of this thread, if it has any.

    `patient`: it sleeps after a poll without progress.
    """
    if not _thread.busy:
        return ready

    def look() -> bool:
        if not advance() and patient:
            time.sleep(NAP_S)
        return ready()

    return look


def of(link: Wire) -> Lanes:
    """Return the lanes of `link`, made on first use."""
    if link.lanes is None:
        link.lanes = Lanes(link)
    return link.lanes


def must_be_here(x: Array) -> None:
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


def _must_be_ours(x: Array) -> bool:
    """Return whether `x` is a device array; raise UsageError if it cannot be sent."""
    if isinstance(x, np.ndarray):
        return False
    must_be_here(x)
    return True


class Lanes:
    """All lanes of one link; used by one thread at a time, like the link."""

    def __init__(self, link: Wire):
        self._link = link
        self._lanes: dict[tuple[str, int], deque[Any]] = defaultdict(deque)

    def isend(self, x: Array, to: int) -> Awaited:
        """Start to send `x` to rank `to`."""
        transfer = self._transfer(x, to, self._link.post_send, Sending)
        self._link.count(x.nbytes)
        return self._begin("to", to, transfer, 0)

    def irecv(self, x: Array, source: int) -> Awaited:
        """Start to fill `x` from rank `source`."""
        transfer = self._transfer(x, source, self._link.post_receive, Receiving)
        return self._begin("from", source, transfer, x.nbytes)

    def sendrecv(self, x: Array, to: int, inbox: Array, source: int) -> None:
        """Send `x` and fill `inbox`, both at once."""
        for array in (x, inbox):
            _must_be_ours(array)  # before anything is posted: a caller that catches this may go on
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
        steps = sum(map(_advance, self._lanes.values()))
        for name in [name for name, lane in self._lanes.items() if not lane]:
            del self._lanes[name]
        if not self._lanes:
            _thread.busy.discard(self)
        return steps

    def wait(self, transfer: Any, call: bytes, peer: int, nbytes: int) -> None:
        """Return once `transfer` is done."""
        _thread.busy.add(self)  # it may have been begun by another thread, which has ended
        if type(transfer) is Plain and transfer.posted and self._only(transfer):
            transfer.wait()
        elif not transfer.done:
            self._link.wait_for(lambda: transfer.done, call, peer, nbytes)
        self.advance()
        transfer.finish()

    def _begin(self, way: str, peer: int, transfer: Transfer, expected: int) -> Awaited:
        lane = self._lanes[way, peer]
        lane.append(transfer)
        _thread.busy.add(self)
        _advance(lane)
        return Awaited(self, transfer, way, peer, expected)

    def _transfer(
        self, x: Array, peer: int, post: Callable[[Any, int], Message], staged: type
    ) -> Any:
        link = self._link
        on_gpu = _must_be_ours(x)
        if on_gpu:
            link.host = None  # later messages must not overtake this one
        pointer = self._by_pointer(peer, x.nbytes)
        if on_gpu and not pointer:
            return staged(x, lambda slot: self._posted(post, slot, peer))
        whole = pointer or not link.paths
        pieces = [x] if whole else cut_as_staged(x)
        return Plain(x, [partial(post, link.message(piece), peer) for piece in pieces])

    def _by_pointer(self, peer: int, nbytes: int) -> bool:
        link = self._link
        return bool(link.paths) and by_pointer(link.paths[peer], link.by_size[peer], nbytes)

    def _posted(self, post: Callable[[Any, int], Message], slot: np.ndarray, peer: int) -> Message:
        self._link.host_bytes += slot.nbytes
        return post(self._link.message(slot), peer)

    def _only(self, transfer: Any) -> bool:
        """Return whether this thread has nothing but `transfer` under way."""
        lanes = list(self._lanes.values())
        return _thread.busy <= {self} and len(lanes) == 1 and list(lanes[0]) == [transfer]


class Awaited:
    """A transfer in a lane; see `hpctrain.transport.link.Request`."""

    def __init__(self, lanes: Lanes, transfer: Transfer, way: str, peer: int, expected: int):
        self._lanes, self._transfer = lanes, transfer
        self._way, self._peer, self._expected = way, peer, expected

    def done(self) -> bool:
        """Return whether the transfer is done, without advancing it."""
        return self._transfer.done

    def wait(self) -> None:
        """Return when the transfer is done, as the current stream sees it."""
        call = b"wait for isend" if self._way == "to" else b"wait for irecv"
        self._lanes.wait(self._transfer, call, self._peer, self._expected)


def cut_as_staged(x: np.ndarray) -> Iterator[np.ndarray]:
    """Yield contiguous `x`, in host memory, in the segments of a staged message."""
    flat = x.reshape(-1).view(np.uint8)
    for start, nbytes in spans(x.nbytes):
        yield flat[start : start + nbytes]


def _advance(lane: deque[Any]) -> int:
    """Advance the transfers of one lane; one may be posted after those before it."""
    steps, turn = 0, True
    for transfer in tuple(lane):
        try:
            steps += transfer.advance(turn)
        except BaseException:
            lane.remove(transfer)  # a caller that catches this may go on
            raise
        turn = turn and transfer.posted
    while lane and lane[0].done:
        lane.popleft()
    return steps
