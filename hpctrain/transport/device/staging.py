"""Staged transfers: a GPU's array travels through pinned host memory, in segments.

    GPU -> host    [ 0 ][ 1 ][ 2 ][ 3 ]                      stream `up` of the sender
    wire                [ 0 ][ 1 ][ 2 ][ 3 ]                 MPI sends and receives host memory
    host -> GPU              [ 0 ][ 1 ][ 2 ][ 3 ]            stream `down` of the receiver

A message of n bytes is cut into about 32 segments of 256 KiB to 4 MiB, a power of two: the first
and the last of them fill and drain the pipeline of three stages, and each costs some 20 us of
processor time. Both sides cut by n alone, wherever their arrays lie. A transfer has at most SLOTS
segments between the GPU and the wire.

Events order everything, and the host never blocks on a device. A copy to the host starts after the
work that the current stream held when the send was posted; a copy to the GPU after the work it held
when the receive was posted, and after `wait` the current stream is ordered behind that copy.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from hpctrain.core.xp import namespace, pinned

SMALLEST_BYTES, LARGEST_BYTES, SEGMENTS = 256 << 10, 4 << 20, 32
SLOTS = 3  # one is filled while one is on the wire and one waits for it


class Posted(Protocol):
    """A message posted to the wire."""

    def done(self) -> bool:
        """Return whether it is complete."""


Post = Callable[[np.ndarray], Posted]  #: posts a slot to the wire, to send it or to fill it


class Slot(NamedTuple):
    """Pinned host memory, by address and as bytes, of the power of two that is `size`."""

    pointer: int
    bytes: np.ndarray
    size: int


class Span(NamedTuple):
    """A segment of an array, in bytes from its start."""

    start: int
    nbytes: int


def segment_bytes(nbytes: int) -> int:
    """Return the length of the segments in which a message of `nbytes` is staged."""
    ideal = 1 << max(nbytes // SEGMENTS - 1, 0).bit_length()
    return min(max(ideal, SMALLEST_BYTES), LARGEST_BYTES)


def spans(nbytes: int) -> Iterator[Span]:
    """Yield the segments of a message; an empty message is one empty segment, as on every link."""
    step = segment_bytes(nbytes)
    for start in range(0, max(nbytes, 1), step):
        yield Span(start, min(step, nbytes - start))


class Staging:
    """The copy streams and the slots of one thread on one GPU."""

    def __init__(self, xp: Any):
        """Make the streams on the current device."""
        self.host_bytes = 0  #: copied to or from the host
        self._cuda = xp.cuda
        self._up, self._down = (xp.cuda.Stream(non_blocking=True) for _ in range(2))
        self._free: dict[int, list[Slot]] = defaultdict(list)
        self._landing: deque[tuple[Any, Slot]] = deque()

    def record_event(self) -> Any:
        """Return an event behind the present work of the current stream."""
        return self._cuda.get_current_stream().record(self._event())

    def before_what_follows(self, event: Any) -> None:
        """Order later work of the current stream after `event`."""
        self._cuda.get_current_stream().wait_event(event)

    def take(self, nbytes: int) -> Slot:
        """Return an unused slot of at least `nbytes`."""
        while self._landing and self._landing[0][0].done:
            self.give(self._landing.popleft()[1])
        size = max(SMALLEST_BYTES, 1 << max(nbytes - 1, 0).bit_length())
        return self._free[size].pop() if self._free[size] else self._pinned(size)

    def give(self, slot: Slot) -> None:
        """Take back a slot."""
        self._free[slot.size].append(slot)

    def to_host(self, pointer: int, slot: Slot, nbytes: int, after: Any) -> Any:
        """Start to copy device memory into `slot`, after event `after`; return the copy's event."""
        kind = self._cuda.runtime.memcpyDeviceToHost
        return self._copied(self._up, slot.pointer, pointer, nbytes, kind, after)

    def to_device(self, slot: Slot, pointer: int, nbytes: int, after: Any) -> Any:
        """Start to copy from `slot`, which is free again after the returned event."""
        kind = self._cuda.runtime.memcpyHostToDevice
        event = self._copied(self._down, pointer, slot.pointer, nbytes, kind, after)
        self._landing.append((event, slot))
        return event

    def _copied(self, stream: Any, to: int, source: int, nbytes: int, kind: int, after: Any) -> Any:
        stream.wait_event(after)
        self.host_bytes += nbytes
        if nbytes:  # an array without elements has no address
            self._cuda.runtime.memcpyAsync(to, source, nbytes, kind, stream.ptr)
        return stream.record(self._event())

    def _event(self) -> Any:
        return self._cuda.Event(disable_timing=True)

    def _pinned(self, size: int) -> Slot:
        # Never freed: allocating pinned memory stops the whole device for milliseconds.
        memory = pinned(size)
        return Slot(memory.ptr, np.frombuffer(memory, np.uint8, size), size)


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.of: dict[tuple[Any, int], Staging] = {}  # by CuPy and device


_thread = _ThreadState()


def staging(x: Any) -> Staging:
    """Return this thread's streams and slots for the GPU of the device array `x`."""
    xp = namespace(x)
    name = (xp, x.data.device_id)
    if name not in _thread.of:
        _thread.of[name] = Staging(xp)
    return _thread.of[name]


class Sending:
    """A staged send of a device array."""

    def __init__(self, x: Any, post: Post):
        """Send contiguous `x` by `post`, which is called for each slot in turn."""
        self._staging, self._post, self._x = staging(x), post, x
        self._after = self._staging.record_event()
        self._left = deque(spans(x.nbytes))
        self._copied: deque[tuple[Any, Slot, int]] = deque()
        self._sent: deque[tuple[Posted, Slot]] = deque()

    @property
    def posted(self) -> bool:
        """Whether all segments are posted."""
        return not self._left and not self._copied

    @property
    def done(self) -> bool:
        """Whether the array may be written again."""
        return self.posted and not self._sent

    def advance(self, turn: bool) -> int:
        """Return the number of steps done; `turn`: segments may be posted."""
        steps = 0
        while self._left and len(self._copied) + len(self._sent) < SLOTS:
            span = self._left.popleft()
            slot = self._staging.take(span.nbytes)
            pointer = self._x.data.ptr + span.start
            event = self._staging.to_host(pointer, slot, span.nbytes, self._after)
            self._copied.append((event, slot, span.nbytes))
            steps += 1
        while turn and self._copied and self._copied[0][0].done:
            _, slot, nbytes = self._copied.popleft()
            self._sent.append((self._post(slot.bytes[:nbytes]), slot))
            steps += 1
        while self._sent and self._sent[0][0].done():
            self._staging.give(self._sent.popleft()[1])
            steps += 1
        return steps

    def finish(self) -> None:
        """Do nothing: a complete send needs no ordering."""


class Receiving:
    """A staged receive into a device array."""

    def __init__(self, x: Any, post: Post):
        """Fill contiguous `x` by `post`, which is called for each slot in turn."""
        self._staging, self._post, self._x = staging(x), post, x
        self._after = self._landed = self._staging.record_event()
        self._left = deque(spans(x.nbytes))
        self._coming: deque[tuple[Posted, Slot, Span]] = deque()
        self._landing: deque[Any] = deque()

    @property
    def posted(self) -> bool:
        """Whether all slots are posted."""
        return not self._left

    @property
    def done(self) -> bool:
        """Whether `finish` may be called."""
        return not self._left and not self._coming

    def advance(self, turn: bool) -> int:
        """Return the number of steps done; `turn`: slots may be posted."""
        steps = 0
        while self._landing and self._landing[0].done:
            self._landing.popleft()
        while turn and self._left and len(self._coming) + len(self._landing) < SLOTS:
            span = self._left.popleft()
            slot = self._staging.take(span.nbytes)
            self._coming.append((self._post(slot.bytes[: span.nbytes]), slot, span))
            steps += 1
        while self._coming and self._coming[0][0].done():
            _, slot, (start, nbytes) = self._coming.popleft()
            pointer = self._x.data.ptr + start
            self._landed = self._staging.to_device(slot, pointer, nbytes, self._after)
            self._landing.append(self._landed)
            steps += 1
        return steps

    def finish(self) -> None:
        """Order later work of the current stream after the last copy to the GPU."""
        self._staging.before_what_follows(self._landed)
