"""The trace recorder: spans stored, spans only counted, and the Chrome format."""

from __future__ import annotations

import threading

import pytest

from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.training.run_options import TraceOptions
from hpctrain.watch.trace import Clock, Reading, Trace

CLOCK = Clock(0.0, (Reading(0.0, 0.0, 0.0),))
REFUSED = {
    "one step": ({"steps": [3]}, "expected [first, last]"),
    "an empty range": ({"steps": [3, 3]}, "expected [first, last]"),
    "before the first step": ({"steps": [-1, 3]}, "expected [first, last]"),
    "nothing kept": ({"max_spans": 0}, "greater than or equal to 1"),
    "unknown": ({"step": 3}, "did you mean 'steps'?"),
}


@pytest.mark.parametrize("table", REFUSED)
def test_refused(table):
    table, message = REFUSED[table]
    with pytest.raises(UsageError) as refused:
        config.read(TraceOptions, table, "trace")
    assert message in str(refused.value)


def recorded(options: TraceOptions | None, steps: int = 5) -> Trace:
    """Return a trace of one span of 2 s per step."""
    trace = Trace()
    if options is not None:
        trace.start(options.traced_steps, options.max_spans)
    for step in range(steps):
        trace.step = step
        assert trace.add("work", "compute", 10.0 * step, 10.0 * step + 2) == 2.0
    return trace


#: options, the steps of which spans are kept, spans that are only counted
SAVED = {
    "never started": (None, [], 0),
    "all": (TraceOptions(), [0, 1, 2, 3, 4], 0),
    "some steps": (TraceOptions(steps=[1, 3]), [1, 2], 0),
    "no more room": (TraceOptions(max_spans=3), [0, 1, 2], 2),
    "no more room in some steps": (TraceOptions(steps=[2, 5], max_spans=2), [2, 3], 1),
}


@pytest.mark.parametrize("kind", SAVED)
def test_what_is_kept(kind):
    options, steps, dropped = SAVED[kind]
    trace = recorded(options)
    assert [span.step for span in trace.spans()] == steps
    assert trace.dropped == dropped
    begun = [e for e in trace.events(0, "here", CLOCK) if e["ph"] == "i"]
    assert [e["name"] for e in begun] == [f"step {step}" for step in steps]


def test_a_trace_begins_anew_and_ends():
    trace = recorded(TraceOptions())
    trace.start(TraceOptions().traced_steps, TraceOptions().max_spans)
    trace.add("again", "other", 1.0, 2.0)
    trace.stop()
    trace.step = 6
    trace.add("after the end", "other", 2.0, 3.0)
    assert [span.name for span in trace.spans()] == ["again"]


def test_a_span_tells_its_seconds_recorded_or_not_and_whatever_happens_in_it():
    trace = Trace()
    with trace.span("unseen", "other") as unseen:
        pass
    assert (trace.spans(), unseen.seconds >= 0) == ([], True)
    trace.start(TraceOptions().traced_steps, TraceOptions().max_spans)
    with pytest.raises(ZeroDivisionError), trace.span("push", "wire", nbytes=8) as push:
        raise ZeroDivisionError
    (span,) = trace.spans()
    assert (span.name, span.category, span.args) == ("push", "wire", {"nbytes": 8})
    assert span.stop - span.start == push.seconds


def test_events_of_two_threads():
    trace = Trace()
    trace.start(TraceOptions().traced_steps, TraceOptions().max_spans)
    with trace.span("outer", "compute"):
        trace.add("inner", "wait", 0.0, 0.0)
    wire = threading.Thread(target=lambda: trace.add("bucket 0", "wire", 3.0, 4.5), name="wire")
    wire.start()
    wire.join()
    events = list(trace.events(2, "node7", CLOCK))
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {2001: "main", 2002: "wire"}
    assert events[0]["args"] == {"name": "rank 2 (node7)"}
    assert {e["pid"] for e in events} == {2}
    assert events[-1] == {
        "name": "bucket 0", "cat": "wire", "ph": "X", "pid": 2, "tid": 2002, "ts": 3e6,
        "dur": 1.5e6, "args": {"step": 0},
    }  # fmt: skip


#: readings (at, offset), then own seconds -> microseconds since second 100 of rank 0's clock
CLOCKS = {
    "the same clock": ([(100, 0), (110, 0)], {100: 0, 105: 5e6}),
    "ahead": ([(40, 60), (50, 60)], {40: 0, 45: 5e6}),
    "drifting": ([(40, 60), (50, 61)], {40: 0, 45: 5.5e6, 50: 11e6, 52: 13e6}),
    "one reading": ([(40, 60)], {40: 0, 45: 5e6}),
}


@pytest.mark.parametrize("kind", CLOCKS)
def test_clocks(kind):
    readings, expected = CLOCKS[kind]
    clock = Clock(100.0, tuple(Reading(*item, 0.0) for item in readings))
    assert clock.nanoseconds(list(expected)).tolist() == [1e3 * us for us in expected.values()]
