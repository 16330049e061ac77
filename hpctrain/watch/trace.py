"""The trace of a rank: spans of its threads.

A span is a name, a category and two readings of `time.perf_counter`. If an engine has the readings
anyway, `add` records them and returns the seconds; otherwise `span` reads the clock:

    self.times.wait_s += trace.add("wait for gradients", "wait", waits, arrived)

    with trace.span("push", "wire", bytes=x.nbytes) as push:
        ...
    self.times.wire_s += push.seconds

Spans of a thread nest. Spans of a category add up to the times of the engine: `compute` and
`wait` are the main thread's, `wire` a communication thread's, or inside of a `wait` the main
thread's; `other` is all else. Spans of `stage`, the actions of a pipeline, lie inside of a
`compute`, and have a lane of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from threading import current_thread, get_ident
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, NamedTuple

import numpy as np

Category = Literal["compute", "wire", "wait", "stage", "other"]
SpanArgs = Mapping[str, Any]
MAX_THREADS = 1000  #: more than any rank has of threads and stages


class Span(NamedTuple):
    """An activity of a thread from `start` to `stop`, readings of this rank's clock in seconds."""

    name: str
    category: Category
    thread: int
    start: float
    stop: float
    step: int
    args: SpanArgs | None


class Trace:
    """The spans of a rank; all its threads may add spans. A new trace records nothing."""

    def __init__(self) -> None:
        self.dropped = 0  #: spans beyond `max_spans`
        self._spans: list[tuple[Any, ...]] = []  # no Spans: those cost twice the time to make
        self._threads: dict[int, str] = {}
        self._recording, self._step, self._steps, self._max_spans = False, 0, range(0), 0

    def start(self, steps: range, max_spans: int) -> None:
        """Begin to record `max_spans` spans in `steps`; the calling thread is the main one."""
        self._steps, self._max_spans = steps, max_spans
        self._spans, self._threads, self.dropped = [], {get_ident(): "main"}, 0
        self.step = self._step

    def stop(self) -> None:
        """Stop recording; recorded spans remain."""
        self._steps, self._recording = range(0), False

    @property
    def step(self) -> int:
        """The training step that this rank is in; spans copy it."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step, self._recording = value, value in self._steps

    def add(
        self, name: str, category: Category, start: float, stop: float, args: SpanArgs | None = None
    ) -> float:
        """Record a span of the calling thread; return its length in seconds."""
        if self._recording:
            self._record_span(name, category, start, stop, args)
        return stop - start

    def span(self, name: str, category: Category, **args: Any) -> OpenSpan:
        """Return a context manager that records the enclosed block."""
        return OpenSpan(self, name, category, args)

    @property
    def is_recording(self) -> bool:
        """Whether spans of the present step are recorded."""
        return self._recording

    def spans(self, first: int = 0) -> list[Span]:
        """Return the recorded spans from number `first` on, in the order of their ends."""
        return list(map(Span._make, self._spans[first:]))

    def _record_span(
        self, name: str, category: str, start: float, stop: float, args: SpanArgs | None
    ) -> None:
        if len(self._spans) >= self._max_spans:
            self.dropped += 1
            return
        thread = get_ident()
        if thread not in self._threads:
            self._threads[thread] = current_thread().name
        self._spans.append((name, category, thread, start, stop, self._step, args))

    def _lanes(self) -> dict[int | str, str]:
        """Return the names of the lanes: a lane per thread, then one per stage of a pipeline."""
        stages = {s.args["stage"] for s in self.spans() if s.category == "stage" and s.args}
        lanes: dict[int | str, str] = dict(self._threads.items())
        lanes.update({(name := f"stage {stage}"): name for stage in sorted(stages)})
        return lanes

    def events(self, rank: int, host: str, clock: Clock) -> Iterator[dict[str, Any]]:
        """Yield the recorded spans as events of the Trace Event Format (Google, 2016).

        A process is a rank; complete events ("X") are spans, instants ("i") begin a step.
        """
        # Perfetto merges threads of the same number, even of two processes.
        lanes = self._lanes()
        lane_numbers = {lane: rank * MAX_THREADS + i for i, lane in enumerate(lanes, start=1)}
        main_number = rank * MAX_THREADS + 1
        yield _make_metadata("process_name", rank, main_number, name=f"rank {rank} ({host})")
        yield _make_metadata("process_sort_index", rank, main_number, sort_index=rank)
        for lane, name in lanes.items():
            yield _make_metadata("thread_name", rank, lane_numbers[lane], name=name)
        spans = sorted(self.spans(), key=lambda s: (lane_numbers[_lane(s)], s.start, -s.stop))
        starts = clock.nanoseconds([span.start for span in spans])
        stops = clock.nanoseconds([span.stop for span in spans])
        step = None
        for span, start, stop in zip(spans, starts.tolist(), stops.tolist(), strict=True):
            event_place = {"pid": rank, "tid": lane_numbers[_lane(span)], "ts": start / 1000}
            if span.step != step and event_place["tid"] == main_number:
                step = span.step
                yield {"name": f"step {step}", "ph": "i", "s": "t", **event_place}
            args = {"step": span.step, **(span.args or {})}
            yield {"name": _span_title(span), "cat": span.category, "ph": "X", **event_place,
                   "dur": (stop - start) / 1000, "args": args}  # fmt: skip


class OpenSpan:
    """A span under way; `seconds` is its length once it is over."""

    __slots__ = ("_args", "_category", "_name", "_start", "_trace", "seconds")

    def __init__(self, trace: Trace, name: str, category: Category, args: SpanArgs) -> None:
        self._trace, self._name, self._category, self._args = trace, name, category, args

    def __enter__(self) -> OpenSpan:
        """Read the clock."""
        self._start = perf_counter()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Read the clock again, and record; an exception also ends the span."""
        stop = perf_counter()
        self.seconds = self._trace.add(self._name, self._category, self._start, stop, self._args)


class Reading(NamedTuple):
    """At `at_s` of this rank's clock, rank 0's clock was `offset_s` ahead, +- `uncertainty_s`."""

    at_s: float
    offset_s: float
    uncertainty_s: float


class Clock(NamedTuple):
    """Conversion of this rank's clock to the time since the common start, by rank 0's clock."""

    origin_s: float  #: the common start, on rank 0's clock
    readings: tuple[Reading, ...]  #: in the order of time; linear drift in between

    def nanoseconds(self, seconds: list[float]) -> np.ndarray:
        """Return `seconds` of this rank's clock as nanoseconds since the common start, int64.

        They are whole, so that spans that touch still do so in the file: viewers drop a span that
        reaches into the next one by as little as rounding does.
        """
        clock_s = np.array(seconds, np.float64)
        times_s, offsets_s, _ = zip(*self.readings, strict=True)
        elapsed_ns: np.ndarray = (
            clock_s + np.interp(clock_s, times_s, offsets_s) - self.origin_s
        ) * 1e9
        return np.rint(elapsed_ns).astype(np.int64)


def _lane(span: Span) -> int | str:
    """Return the lane of a span: its stage, or its thread."""
    if span.category != "stage" or span.args is None:
        return span.thread
    return f"stage {span.args['stage']}"


def _span_title(span: Span) -> str:
    """Return the name of a span, with the micro-batch of an action."""
    if span.category != "stage" or span.args is None:
        return span.name
    return f"{span.name} {span.args['micro']}"


def _make_metadata(kind: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": args}
