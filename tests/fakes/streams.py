"""Streams and events. On a lazy machine work in a stream is done only when it is waited for:

    stream a   [ copy ][ add ][ * event e ]           nothing has run yet
    stream b   [ wait for e ][ multiply ]
    b.synchronize()  runs a up to e, then b           what a does behind e still waits

So code that reads device memory by its address (MPI, a neighbour) before the right wait reads the
old contents. The null stream and all streams but those that are `non_blocking` wait for each
other, as CUDA's do. With a seed some streams run before they are waited for, in random order.
"""

from __future__ import annotations

import itertools
import time
from collections import deque

from fakes import races
from fakes.machine import machine

_numbers = itertools.count(0x5000)


class _WithNull(type):
    @property
    def null(cls) -> Stream:
        return null_stream()


class Stream(metaclass=_WithNull):
    """cupy.cuda.Stream."""

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        machine().must_have_devices()
        machine().here.has_context = True
        self.ptr, self.is_non_blocking = 0 if null else next(_numbers), non_blocking
        self.device_id = machine().device
        self.clock = races.Clock(f"stream {self.ptr:#x}")
        self._waiting: deque = deque()
        self.issued = 0  # pieces of work since the start
        self._before: list[Stream] = []
        machine().streams.append(self)

    def __enter__(self):
        self._before.append(get_current_stream())
        _set(self)
        return self

    def __exit__(self, *_):
        _set(self._before.pop())

    def use(self):
        _set(self)
        return self

    @property
    def done(self) -> bool:
        return not self._waiting

    def synchronize(self) -> None:
        machine().count("stream sync")
        self.run()
        races.waited(self)

    def record(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event) -> None:
        races.waits(self, event)
        location, n = event.where
        if location is not None:
            self.put(lambda: location.run(n))

    def launch_host_func(self, callback, arg=None) -> None:
        self.put(lambda: callback(arg))

    def put(self, work) -> None:
        """Run `work` in the order of this stream: now, or on a lazy machine when waited for."""
        now = machine()
        if not now.lazy:
            work()
            return
        with now.lock:
            for other in self._others():
                self._append(lambda s=other, n=other.issued: s.run(n))
            self._append(work)
            _run_some()

    def _append(self, work) -> None:
        self._waiting.append(work)
        self.issued += 1

    def _others(self) -> list[Stream]:
        """Return the streams whose work goes before by CUDA's own rule."""
        return [s for s in self.ordered_before() if not s.done]

    def ordered_before(self) -> list[Stream]:
        """Return the same, and those that have nothing to do."""
        if self.is_non_blocking:
            return []
        streams = [s for s in machine().streams if not s.is_non_blocking and s is not self]
        of_ours = [s for s in streams if s.device_id == self.device_id]
        return of_ours if self.ptr == 0 else [s for s in of_ours if s.ptr == 0]

    def run(self, count: int | None = None) -> None:
        """Do the first `count` pieces of work since the start, all if None."""
        with machine().lock:
            stop = self.issued if count is None else count
            while self.issued - len(self._waiting) < stop:
                self._waiting.popleft()()


class ExternalStream:
    """cupy.cuda.ExternalStream: the stream of a pointer."""

    def __new__(cls, ptr, device_id=-1):
        return by_pointer(ptr)


class Event:
    """cupy.cuda.Event: how far a stream is to go."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        machine().must_have_devices()
        self.where: tuple[Stream | None, int] = (None, 0)
        self.ptr, self.at = next(_numbers), 0.0
        self.epochs: dict[int, int] = {}  # by the clock of the stream

    def record(self, stream=None) -> None:
        stream = get_current_stream() if stream is None else stream
        self.where, self.at = (stream, stream.issued), time.perf_counter()
        races.record(stream, self)

    @property
    def done(self) -> bool:
        """Whether all before it has run; on a lazy machine some more runs at each look."""
        stream, n = self.where
        behind = 0 if stream is None else n - stream.issued + len(stream._waiting)
        if stream is not None and behind > 0:
            stream.run(n - behind + 1)
        if behind <= 0:
            races.waited_for(self)
        return behind <= 0

    def synchronize(self) -> None:
        machine().count("event sync")
        stream, n = self.where
        if stream is not None:
            stream.run(n)
        races.waited_for(self)


def _run_some() -> None:
    """Let streams that have work do a random part of it, in random order, where there is a seed."""
    draw = machine().random
    if draw is not None:
        busy = [stream for stream in machine().streams if not stream.done]
        for stream in draw.sample(busy, draw.randint(0, len(busy))):
            done = stream.issued - len(stream._waiting)
            stream.run(draw.randint(done, stream.issued))


def null_stream() -> Stream:
    """Return the null stream of the current device."""
    now = machine()
    with now.lock:
        if now.device not in now.nulls:
            now.nulls[now.device] = Stream(null=True)
        return now.nulls[now.device]


def by_pointer(ptr: int) -> Stream:
    if ptr in (0, 1):  # 1: the legacy null stream by name
        return null_stream()
    return next(s for s in machine().streams if s.ptr == ptr)


def get_current_stream(device_id=-1) -> Stream:
    """Return this thread's stream of the current device."""
    now = machine()
    streams = now.here.__dict__.setdefault("streams", {})
    return streams.get(now.device) or null_stream()


def get_elapsed_time(start: Event, end: Event) -> float:
    """Return milliseconds between two events."""
    return (end.at - start.at) * 1e3


def _set(stream: Stream) -> None:
    machine().here.__dict__.setdefault("streams", {})[machine().device] = stream
