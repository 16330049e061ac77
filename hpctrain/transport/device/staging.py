"""Staged transfers: a GPU's array travels through pinned host memory, in segments.

    GPU -> host    [ 0 ][ 1 ][ 2 ][ 3 ]                      the sender's stream to the host
    wire                [ 0 ][ 1 ][ 2 ][ 3 ]                 MPI sends and receives host memory
    host -> GPU              [ 0 ][ 1 ][ 2 ][ 3 ]            the receiver's stream to the GPU

A message of n bytes is cut into about 32 segments of 256 KiB to 4 MiB, a power of two: the first
and the last segment fill and drain the pipeline of three stages, and each costs some 20 us of
processor time. Both sides cut by n alone, wherever their arrays lie. A transfer has at most BUFFERS
segments between the GPU and the wire.

Events order everything, and the host never blocks on a device. A copy to the host starts after the
work that the current stream held when the send was posted; a copy to the GPU after the work it held
when the receive was posted, and after `wait` the current stream is ordered behind that copy.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from hpctrain.core.xp import namespace, pinned

MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES, TARGET_SEGMENTS = 256 << 10, 4 << 20, 32
MAX_BUFFERS = 3  # one is filled while one is on the wire and one waits for it


class PostedBuffer(Protocol):
    """A buffer posted to the wire."""

    def done(self) -> bool:
        """Return whether the message is complete."""


#: Posts a buffer to the wire, to send or to fill it.
PostBuffer = Callable[[np.ndarray], PostedBuffer]


class PinnedBuffer(NamedTuple):
    """Pinned host memory: its address, its bytes, and its `size`, a power of two."""

    pointer: int
    bytes: np.ndarray
    size: int


class CopyStream(NamedTuple):
    """A stream of copies in one direction, of CUDA's `kind`."""

    stream: Any
    kind: int


class Segment(NamedTuple):
    """A segment of an array, in bytes from its start."""

    start: int
    nbytes: int


def segment_bytes(nbytes: int) -> int:
    """Return the length of the segments in which a message of `nbytes` is staged."""
    ideal_bytes = 1 << max(nbytes // TARGET_SEGMENTS - 1, 0).bit_length()
    return min(max(ideal_bytes, MIN_SEGMENT_BYTES), MAX_SEGMENT_BYTES)


def cut_segments(nbytes: int) -> Iterator[Segment]:
    """Yield the segments of a message; an empty message is one empty segment, as on every link."""
    step = segment_bytes(nbytes)
    for start in range(0, max(nbytes, 1), step):
        yield Segment(start, min(step, nbytes - start))


class Staging:
    """The copy streams and pinned buffers of a thread on a GPU."""

    def __init__(self, xp: Any):
        """Make the streams on the current device."""
        self.host_bytes = 0  #: bytes copied to or from the host
        self._cuda = xp.cuda
        kinds = xp.cuda.runtime.memcpyDeviceToHost, xp.cuda.runtime.memcpyHostToDevice
        self._to_host, self._to_device = (
            CopyStream(xp.cuda.Stream(non_blocking=True), kind) for kind in kinds
        )
        self._free_buffers: dict[int, list[PinnedBuffer]] = defaultdict(list)
        self._copying: deque[tuple[Any, PinnedBuffer]] = deque()
        # CuPy gives the buffers to others as soon as this thread has ended.
        weakref.finalize(self, self._to_device.stream.synchronize).atexit = False

    def record_event(self) -> Any:
        """Return an event after the present work of the current stream."""
        return self._cuda.get_current_stream().record(self._new_event())

    def make_stream_wait(self, event: Any) -> None:
        """Order later work of the current stream after `event`."""
        self._cuda.get_current_stream().wait_event(event)

    def acquire(self, nbytes: int) -> PinnedBuffer:
        """Return an unused buffer of at least `nbytes`."""
        while self._copying and self._copying[0][0].done:
            self.release(self._copying.popleft()[1])
        size = max(MIN_SEGMENT_BYTES, 1 << max(nbytes - 1, 0).bit_length())
        return (
            self._free_buffers[size].pop()
            if self._free_buffers[size]
            else self._allocate_pinned(size)
        )

    def release(self, buffer: PinnedBuffer) -> None:
        """Return `buffer` to the free buffers."""
        self._free_buffers[buffer.size].append(buffer)

    def copy_to_host(
        self, pointer: int, buffer: PinnedBuffer, nbytes: int, awaited_event: Any
    ) -> Any:
        """Start to copy device memory into `buffer` after `awaited_event`; return its event."""
        return self._copied(self._to_host, buffer.pointer, pointer, nbytes, awaited_event)

    def copy_to_device(
        self, buffer: PinnedBuffer, pointer: int, nbytes: int, awaited_event: Any
    ) -> Any:
        """Start to copy from `buffer`; it is free again after the returned event."""
        event = self._copied(self._to_device, pointer, buffer.pointer, nbytes, awaited_event)
        self._copying.append((event, buffer))
        return event

    def _copied(
        self, by: CopyStream, destination: int, source: int, nbytes: int, awaited_event: Any
    ) -> Any:
        stream, kind = by
        stream.wait_event(awaited_event)
        self.host_bytes += nbytes
        if nbytes:  # an array without elements has no address
            self._cuda.runtime.memcpyAsync(destination, source, nbytes, kind, stream.ptr)
        return stream.record(self._new_event())

    def _new_event(self) -> Any:
        return self._cuda.Event(disable_timing=True)

    def _allocate_pinned(self, size: int) -> PinnedBuffer:
        # Never freed: allocating pinned memory stops the whole device for milliseconds.
        memory = pinned(size)
        return PinnedBuffer(memory.ptr, np.frombuffer(memory, np.uint8, size), size)


class _ThreadStaging(threading.local):
    def __init__(self) -> None:
        self.staging_by_device: dict[tuple[Any, int], Staging] = {}  # by CuPy and device


_thread_state = _ThreadStaging()


def staging_for(x: Any) -> Staging:
    """Return this thread's streams and buffers for the GPU of the device array `x`."""
    xp = namespace(x)
    key = (xp, x.data.device_id)
    if key not in _thread_state.staging_by_device:
        _thread_state.staging_by_device[key] = Staging(xp)
    return _thread_state.staging_by_device[key]


class StagedSend:
    """A staged send of a device array."""

    def __init__(self, x: Any, post_buffer: PostBuffer):
        """Send contiguous `x` by `post_buffer`, which is called for each buffer in turn."""
        self._staging, self._post_buffer, self._x = staging_for(x), post_buffer, x
        self._awaited_event = self._staging.record_event()
        self._remaining_segments = deque(cut_segments(x.nbytes))
        self._copied: deque[tuple[Any, PinnedBuffer, int]] = deque()
        self._sending_buffers: deque[tuple[PostedBuffer, PinnedBuffer]] = deque()

    @property
    def is_posted(self) -> bool:
        """Whether all segments are posted."""
        return not self._remaining_segments and not self._copied

    @property
    def done(self) -> bool:
        """Whether the array may be written again."""
        return self.is_posted and not self._sending_buffers

    def advance(self, may_post: bool) -> int:
        """Return the number of steps done; `may_post`: segments may be posted."""
        steps = 0
        while (
            self._remaining_segments
            and len(self._copied) + len(self._sending_buffers) < MAX_BUFFERS
        ):
            segment = self._remaining_segments.popleft()
            buffer = self._staging.acquire(segment.nbytes)
            pointer = self._x.data.ptr + segment.start
            event = self._staging.copy_to_host(pointer, buffer, segment.nbytes, self._awaited_event)
            self._copied.append((event, buffer, segment.nbytes))
            steps += 1
        while may_post and self._copied and self._copied[0][0].done:
            _, buffer, nbytes = self._copied.popleft()
            self._sending_buffers.append((self._post_buffer(buffer.bytes[:nbytes]), buffer))
            steps += 1
        while self._sending_buffers and self._sending_buffers[0][0].done():
            self._staging.release(self._sending_buffers.popleft()[1])
            steps += 1
        return steps

    def finish(self) -> None:
        """Do nothing: a complete send needs no ordering."""


class StagedReceive:
    """A staged receive into a device array."""

    def __init__(self, x: Any, post_buffer: PostBuffer):
        """Fill contiguous `x` by `post_buffer`, which is called for each buffer in turn."""
        self._staging, self._post_buffer, self._x = staging_for(x), post_buffer, x
        self._awaited_event = self._last_copy = self._staging.record_event()
        self._remaining_segments = deque(cut_segments(x.nbytes))
        self._receiving_buffers: deque[tuple[PostedBuffer, PinnedBuffer, Segment]] = deque()
        self._copying: deque[Any] = deque()

    @property
    def is_posted(self) -> bool:
        """Whether all buffers are posted."""
        return not self._remaining_segments

    @property
    def done(self) -> bool:
        """Whether `finish` may be called."""
        return not self._remaining_segments and not self._receiving_buffers

    def advance(self, may_post: bool) -> int:
        """Return the number of steps done; `may_post`: buffers may be posted."""
        steps = 0
        while self._copying and self._copying[0].done:
            self._copying.popleft()
        while (
            may_post
            and self._remaining_segments
            and len(self._receiving_buffers) + len(self._copying) < MAX_BUFFERS
        ):
            segment = self._remaining_segments.popleft()
            buffer = self._staging.acquire(segment.nbytes)
            self._receiving_buffers.append(
                (self._post_buffer(buffer.bytes[: segment.nbytes]), buffer, segment)
            )
            steps += 1
        while self._receiving_buffers and self._receiving_buffers[0][0].done():
            _, buffer, (start, nbytes) = self._receiving_buffers.popleft()
            pointer = self._x.data.ptr + start
            self._last_copy = self._staging.copy_to_device(
                buffer, pointer, nbytes, self._awaited_event
            )
            self._copying.append(self._last_copy)
            steps += 1
        return steps

    def finish(self) -> None:
        """Order later work of the current stream after the last copy to the GPU."""
        self._staging.make_stream_wait(self._last_copy)
