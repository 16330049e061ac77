"""Staged transfers: a GPU's array travels through pinned host memory, in segments.

    GPU -> host    [ 0 ][ 1 ][ 2 ][ 3 ]                      stream `up` of the sender
    wire                [ 0 ][ 1 ][ 2 ][ 3 ]                 MPI sends and receives host memory
    host -> GPU              [ 0 ][ 1 ][ 2 ][ 3 ]            stream `down` of the receiver

A message of n bytes is cut into about 32 segments of 256 KiB to 4 MiB, a power of two: the first
and the last of them fill and drain the pipeline of three stages, and each costs some 20 us of
processor time. Both sides cut by n alone, wherever their arrays lie. A transfer has at most BUFFERS
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

MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES, SEGMENTS = 256 << 10, 4 << 20, 32
BUFFERS = 3  # one is filled while one is on the wire and one waits for it


class Posted(Protocol):
    """A message posted to the wire."""

    def done(self) -> bool:
        """Return whether it is complete."""


Post = Callable[[np.ndarray], Posted]  #: posts a buffer to the wire, to send it or to fill it


class PinnedBuffer(NamedTuple):
    """Pinned host memory, by address and as bytes, of the power of two that is `size`."""

    pointer: int
    bytes: np.ndarray
    size: int


class Segment(NamedTuple):
    """A segment of an array, in bytes from its start."""

    start: int
    nbytes: int


def segment_bytes(nbytes: int) -> int:
    """Return the length of the segments in which a message of `nbytes` is staged."""
    ideal = 1 << max(nbytes // SEGMENTS - 1, 0).bit_length()
    return min(max(ideal, MIN_SEGMENT_BYTES), MAX_SEGMENT_BYTES)


def segments(nbytes: int) -> Iterator[Segment]:
    """Yield the segments of a message; an empty message is one empty segment, as on every link."""
    step = segment_bytes(nbytes)
    for start in range(0, max(nbytes, 1), step):
        yield Segment(start, min(step, nbytes - start))


class Staging:
    """The copy streams and the buffers of one thread on one GPU."""

    def __init__(self, xp: Any):
        """Make the streams on the current device."""
        self.host_bytes = 0  #: copied to or from the host
        self._cuda = xp.cuda
        self._to_device_stream, self._to_host_stream = (
            xp.cuda.Stream(non_blocking=True) for _ in range(2)
        )
        self._free_buffers: dict[int, list[PinnedBuffer]] = defaultdict(list)
        self._copying: deque[tuple[Any, PinnedBuffer]] = deque()

    def record_event(self) -> Any:
        """Return an event behind the present work of the current stream."""
        return self._cuda.get_current_stream().record(self._event())

    def make_stream_wait(self, event: Any) -> None:
        """Order later work of the current stream after `event`."""
        self._cuda.get_current_stream().wait_event(event)

    def acquire(self, nbytes: int) -> PinnedBuffer:
        """Return an unused buffer of at least `nbytes`."""
        while self._copying and self._copying[0][0].done:
            self.release(self._copying.popleft()[1])
        size = max(MIN_SEGMENT_BYTES, 1 << max(nbytes - 1, 0).bit_length())
        return self._free_buffers[size].pop() if self._free_buffers[size] else self._pinned(size)

    def release(self, buffer: PinnedBuffer) -> None:
        """Return a buffer to the free ones."""
        self._free_buffers[buffer.size].append(buffer)

    def to_host(self, pointer: int, buffer: PinnedBuffer, nbytes: int, awaited_event: Any) -> Any:
        """Start to copy device memory into `buffer` after `awaited_event`; return its event."""
        kind = self._cuda.runtime.memcpyDeviceToHost
        return self._copied(
            self._to_device_stream, buffer.pointer, pointer, nbytes, kind, awaited_event
        )

    def to_device(self, buffer: PinnedBuffer, pointer: int, nbytes: int, awaited_event: Any) -> Any:
        """Start to copy from `buffer`, which is free again after the returned event."""
        kind = self._cuda.runtime.memcpyHostToDevice
        event = self._copied(
            self._to_host_stream, pointer, buffer.pointer, nbytes, kind, awaited_event
        )
        self._copying.append((event, buffer))
        return event

    def _copied(
        self, stream: Any, destination: int, source: int, nbytes: int, kind: int, awaited_event: Any
    ) -> Any:
        stream.wait_event(awaited_event)
        self.host_bytes += nbytes
        if nbytes:  # an array without elements has no address
            self._cuda.runtime.memcpyAsync(destination, source, nbytes, kind, stream.ptr)
        return stream.record(self._event())

    def _event(self) -> Any:
        return self._cuda.Event(disable_timing=True)

    def _pinned(self, size: int) -> PinnedBuffer:
        # Never freed: allocating pinned memory stops the whole device for milliseconds.
        memory = pinned(size)
        return PinnedBuffer(memory.ptr, np.frombuffer(memory, np.uint8, size), size)


class _ThreadStaging(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[tuple[Any, int], Staging] = {}  # by CuPy and device


_thread = _ThreadStaging()


def staging(x: Any) -> Staging:
    """Return this thread's streams and buffers for the GPU of the device array `x`."""
    xp = namespace(x)
    name = (xp, x.data.device_id)
    if name not in _thread.by_device:
        _thread.by_device[name] = Staging(xp)
    return _thread.by_device[name]


class Sending:
    """A staged send of a device array."""

    def __init__(self, x: Any, post: Post):
        """Send contiguous `x` by `post`, which is called for each buffer in turn."""
        self._staging, self._post, self._x = staging(x), post, x
        self._awaited_event = self._staging.record_event()
        self._remaining = deque(segments(x.nbytes))
        self._copied: deque[tuple[Any, PinnedBuffer, int]] = deque()
        self._sent: deque[tuple[Posted, PinnedBuffer]] = deque()

    @property
    def posted(self) -> bool:
        """Whether all segments are posted."""
        return not self._remaining and not self._copied

    @property
    def done(self) -> bool:
        """Whether the array may be written again."""
        return self.posted and not self._sent

    def advance(self, may_post: bool) -> int:
        """Return the number of steps done; `may_post`: segments may be posted."""
        steps = 0
        while self._remaining and len(self._copied) + len(self._sent) < BUFFERS:
            segment = self._remaining.popleft()
            buffer = self._staging.acquire(segment.nbytes)
            pointer = self._x.data.ptr + segment.start
            event = self._staging.to_host(pointer, buffer, segment.nbytes, self._awaited_event)
            self._copied.append((event, buffer, segment.nbytes))
            steps += 1
        while may_post and self._copied and self._copied[0][0].done:
            _, buffer, nbytes = self._copied.popleft()
            self._sent.append((self._post(buffer.bytes[:nbytes]), buffer))
            steps += 1
        while self._sent and self._sent[0][0].done():
            self._staging.release(self._sent.popleft()[1])
            steps += 1
        return steps

    def finish(self) -> None:
        """Do nothing: a complete send needs no ordering."""


class Receiving:
    """A staged receive into a device array."""

    def __init__(self, x: Any, post: Post):
        """Fill contiguous `x` by `post`, which is called for each buffer in turn."""
        self._staging, self._post, self._x = staging(x), post, x
        self._awaited_event = self._last_copy = self._staging.record_event()
        self._remaining = deque(segments(x.nbytes))
        self._receiving: deque[tuple[Posted, PinnedBuffer, Segment]] = deque()
        self._copying: deque[Any] = deque()

    @property
    def posted(self) -> bool:
        """Whether all buffers are posted."""
        return not self._remaining

    @property
    def done(self) -> bool:
        """Whether `finish` may be called."""
        return not self._remaining and not self._receiving

    def advance(self, may_post: bool) -> int:
        """Return the number of steps done; `may_post`: buffers may be posted."""
        steps = 0
        while self._copying and self._copying[0].done:
            self._copying.popleft()
        while may_post and self._remaining and len(self._receiving) + len(self._copying) < BUFFERS:
            segment = self._remaining.popleft()
            buffer = self._staging.acquire(segment.nbytes)
            self._receiving.append((self._post(buffer.bytes[: segment.nbytes]), buffer, segment))
            steps += 1
        while self._receiving and self._receiving[0][0].done():
            _, buffer, (start, nbytes) = self._receiving.popleft()
            pointer = self._x.data.ptr + start
            self._last_copy = self._staging.to_device(buffer, pointer, nbytes, self._awaited_event)
            self._copying.append(self._last_copy)
            steps += 1
        return steps

    def finish(self) -> None:
        """Order later work of the current stream after the last copy to the GPU."""
        self._staging.make_stream_wait(self._last_copy)
