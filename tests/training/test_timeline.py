"""The trace of a run: spans of all ranks on one clock, complete however the run ended."""

from __future__ import annotations

import json
import logging
import threading
from collections import defaultdict
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
from ranks import on_ranks, run_on

from hpctrain import data, engines, nn, optim
from hpctrain.core.errors import StoppedError, TrainingError, UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.core.signals import StopRequest
from hpctrain.training import recipe, runs, timeline
from hpctrain.training.run_options import TraceOptions
from hpctrain.training.trainer import Trainer
from hpctrain.tuning.select import ALGORITHM_NAMES

ROUNDING_US = 1e-5  # times are written in whole nanoseconds
SMALL = ["model.widths=[64,32,10]", "run.epochs=2", "trace.enabled=true", "wire.bucket_bytes=2048"]
BATCH_NORM = ["model.kind=resnet20", "model.widths=", "model.blocks=1", "model.channels=[4]"]


def train(out, size, *changes, resume=False):
    spec = recipe.load("digits", [*SMALL, *changes])
    return run_on("threads", size, lambda world: runs.train(spec, world, out, resume))


class Traced:
    """A trace file, looked at: its spans by (rank, thread), in the order of their starts."""

    def __init__(self, path):
        reported = json.loads(path.read_text())
        self.about, events = reported["otherData"], reported["traceEvents"]
        self.names = {(e["pid"], e["tid"]): e["args"]["name"]
                      for e in events if e["name"] == "thread_name"}  # fmt: skip
        self.threads = defaultdict(list)
        for e in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
            self.threads[e["pid"], self.names[e["pid"], e["tid"]]].append(e)
        of_thread = {(e["tid"], e["pid"]) for e in events}
        assert len(of_thread) == len({tid for tid, _ in of_thread})  # Perfetto mixes them otherwise
        self.ranks = sorted({rank for rank, _ in self.threads})

    def seconds(self, rank, category):
        """Return the time spent in `category`; what a span encloses is not its own."""
        total = 0.0
        for of, thread in self.threads.items():
            if of[0] == rank:
                total += sum(own for e, own in exclusive(thread) if e["cat"] == category)
        return total / 1e6


def exclusive(events):
    """Return (event, its microseconds without those of events inside it); fail where two cross."""
    result, inside = [], []
    for event in events:
        while inside and ends(inside[-1][0]) <= event["ts"] + ROUNDING_US:
            result.append(inside.pop())
        if inside:
            assert ends(event) <= ends(inside[-1][0]) + ROUNDING_US, (event, inside[-1])
            if (inside[-1][0]["cat"], event["cat"]) != ("wait", "wire"):  # who sums, waits for it
                inside[-1][1] -= event["dur"]
        inside.append([event, event["dur"]])
    return result + inside


def ends(event):
    return event["ts"] + event["dur"]


@pytest.mark.parametrize("change", [[], BATCH_NORM], ids=["mlp", "sums in layers"])
@pytest.mark.parametrize("size", [1, 3])
def test_spans_nest_and_add_up_to_the_times_of_each_rank(tmp_path, size, change):
    train(tmp_path / "run", size, *change)
    observed, row = (
        Traced(tmp_path / "run" / timeline.MERGED),
        run_folder.rows(tmp_path / "run")[-1],
    )
    assert observed.ranks == list(range(size))
    for rank in observed.ranks:
        for category in ("compute", "wait", "wire"):
            expected = row["ranks"][f"{category}_s"][rank]
            assert observed.seconds(rank, category) == pytest.approx(expected, rel=0.01, abs=1e-5)
    assert row["compute_s"] == pytest.approx(row["ranks"]["compute_s"][0], abs=1e-6)


@on_ranks(2, mpi=(2,))
def test_wire_overlaps_compute(ranks, tmp_path_factory):
    def body(world):
        x = np.random.default_rng(0).standard_normal((512, 256)).astype(np.float32)
        layers = {str(i): nn.Linear(256) for i in range(6)}
        engine = engines.AllReduce(bucket_bytes=1, overlap="always")  # a bucket per slot
        trainer = Trainer(nn.Model(layers, (256,)), optim.sgd(0.01), engine, world=world)
        out = world.gather(str(tmp_path_factory.mktemp("overlap") / "run"))[0]
        samples = data.Dataset(x, np.arange(512) % 256)
        traced = TraceOptions(enabled=True)
        summary = trainer.fit(samples, steps=10, batch=512, out=out, trace=traced)
        trainer.close()
        if world.rank == 0:  # the others may be done before it has merged
            look_for_overlap(Traced(Path(out) / timeline.MERGED), summary["algorithm"])

    ranks(body)


def look_for_overlap(observed, algorithm):
    reference, chosen = {*ALGORITHM_NAMES, "direct-shared"} - {"auto"}, set()
    for rank in (0, 1):
        main, wire = observed.threads[rank, "main"], observed.threads[rank, "wire"]
        assert sorted(e["args"]["bytes"] for e in wire) == [4 * 256] * 60 + [4 * 256 * 256] * 60
        chosen |= {e["args"]["algorithm"] for e in wire}
        compute = [e for e in main if e["cat"] == "compute"]
        pair = [a for a in compute if any(b["ts"] < ends(a) and a["ts"] < ends(b) for b in wire)]
        assert pair  # in how many of the steps, is the machine's business
    assert chosen <= reference
    reported = algorithm.removeprefix("auto (").removesuffix(")").split(", ")
    assert set(reported) == chosen and "auto" in algorithm


def stop(monkeypatch):
    monkeypatch.setattr(StopRequest, "requested", property(lambda self: True, lambda *_: None),
                        raising=False)  # fmt: skip


def break_data(monkeypatch):
    rows = data.Dataset.rows

    def broken(self, indexes, epoch=0):
        if epoch == 1:
            raise ZeroDivisionError("planted")
        return rows(self, indexes, epoch)

    monkeypatch.setattr(data.Dataset, "rows", broken)


#: what is changed, what is then raised, and the steps that were traced
ENDS = {
    "done": (lambda _: None, [], None, 24),
    "stopped": (stop, [], StoppedError, 1),
    "failed on all ranks": (lambda _: None, ["optimizer.rate=1e30"], TrainingError, 2),
    "failed on each by itself": (break_data, [], ZeroDivisionError, 13),
}


@pytest.mark.parametrize("method", ENDS)
def test_the_trace_is_whole_however_a_run_ends(tmp_path, monkeypatch, method):
    plant, changes, error, steps = ENDS[method]
    plant(monkeypatch)
    if error is None:
        train(tmp_path / "run", 2)
    else:
        with pytest.raises(error):
            train(tmp_path / "run", 2, *changes)
    observed = Traced(tmp_path / "run" / timeline.MERGED)
    for rank in range(2):
        assert Traced(timeline.path_of(tmp_path / "run", rank)).ranks == [rank]
        main = observed.threads[rank, "main"]
        exclusive(main)
        assert len({e["args"]["step"] for e in main}) == steps
    assert run_folder.read_summary(tmp_path / "run")["status"] == method.split()[0]
    assert not list((tmp_path / "run").rglob(".*rank*")) + list(tmp_path.rglob(".trace*"))


def test_a_resumed_run_replaces_the_trace(tmp_path, monkeypatch):
    with monkeypatch.context() as requested:
        stop(requested)
        with pytest.raises(StoppedError):
            train(tmp_path / "run", 3)
    train(tmp_path / "run", 2, resume=True)
    observed = Traced(tmp_path / "run" / timeline.MERGED)
    assert observed.ranks == [0, 1]
    assert not timeline.path_of(tmp_path / "run", 2).exists()
    steps = [e["args"]["step"] for e in observed.threads[0, "main"] if e["name"] == "update"]
    assert steps == list(range(1, 24))


def test_only_the_steps_and_spans_that_were_asked_for(tmp_path, caplog):
    train(tmp_path / "steps", 2, "trace.steps=[3, 5]")
    observed = Traced(tmp_path / "steps" / timeline.MERGED)
    assert {e["args"]["step"] for thread in observed.threads.values() for e in thread} == {3, 4}
    assert "trace" not in caplog.text
    train(tmp_path / "few", 2, "trace.max_spans=20")
    observed = Traced(tmp_path / "few" / timeline.MERGED)
    assert [sum(len(t) for of, t in observed.threads.items() if of[0] == r) for r in (0, 1)] == [
        20,
        20,
    ]
    dropped = [about["dropped_spans"] for about in observed.about["ranks"]]
    assert min(dropped) > 24 * 3
    message = f"trace.max_spans is 20, and rank 0 had {dropped[0]} more"
    assert caplog.text.count("the trace is incomplete") == caplog.text.count(message) == 1


def test_no_trace_unless_asked(tmp_path):
    train(tmp_path / "run", 2, "trace.enabled=false")
    assert not (tmp_path / "run" / timeline.MERGED).exists()
    assert not (tmp_path / "run" / timeline.FOLDER).exists()


def test_a_trace_needs_a_folder():
    def body(world):
        trainer = Trainer(nn.Model({"a": nn.Linear(2)}, (2,)), optim.sgd(0.1), world=world)
        samples = data.Dataset(np.zeros((4, 2)), np.zeros(4, np.int64))
        trainer.fit(samples, steps=1, batch=4, trace=TraceOptions(enabled=True))

    with pytest.raises(UsageError, match="give fit out=DIR"):
        run_on("threads", 1, body)


@pytest.mark.parametrize("blocked", [timeline.FOLDER, timeline.MERGED])
def test_a_trace_that_cannot_be_written_is_one_warning(tmp_path, caplog, blocked):
    out = tmp_path / "run"
    (out / timeline.MERGED / "in the way").mkdir(parents=True)
    if blocked == timeline.FOLDER:
        (out / timeline.FOLDER).write_text("in the way")
    with caplog.at_level(logging.WARNING):
        summaries = train(out, 2, resume=True)  # where no checkpoint was made, it starts
    assert [item["status"] for item in summaries] == ["done", "done"]
    assert run_folder.read_summary(out)["status"] == "done"
    assert caplog.text.count("could not be written: ") == 1
    assert blocked in caplog.text


def test_a_span_may_tell_anything(tmp_path):
    def body(world):
        traced = timeline.Timeline(world, tmp_path, TraceOptions(enabled=True))
        traced.begin()
        with world.trace.span("push", "wire", nbytes=np.int64(8), to=tmp_path):
            pass
        traced.end()

    run_on("threads", 1, body)
    ((span,),) = Traced(tmp_path / timeline.MERGED).threads.values()
    assert span["args"] == {"step": 0, "nbytes": "8", "to": str(tmp_path)}


SKEW_S = (0.0, 1000.0, -5.0, 0.25)


def test_offsets_are_found_within_their_uncertainty():
    def body(world):
        skew = SKEW_S[world.rank]
        return timeline.clock_offset(world.link, [1, 3], lambda: perf_counter() + skew)

    result = run_on("threads", 4, body)
    for rank, reading in enumerate(result):
        expected = -SKEW_S[rank] if rank in (1, 3) else 0.0
        assert abs(reading.offset_s - expected) <= reading.uncertainty_s + 1e-9
        assert (reading.uncertainty_s > 0) == (rank in (1, 3))


def test_ranks_on_other_hosts_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "kernel", lambda: str(threading.get_ident()))
    train(tmp_path / "run", 3)
    observed = Traced(tmp_path / "run" / timeline.MERGED)
    assert [about["clock_uncertainty_s"] > 0 for about in observed.about["ranks"]] == [0, 1, 1]
    for about in observed.about["ranks"]:  # threads of one process: in truth all clocks are one
        assert abs(about["clock_offset_s"]) <= about["clock_uncertainty_s"]
    main = [observed.threads[rank, "main"] for rank in range(3)]
    uncertain = 1e6 * max(about["clock_uncertainty_s"] for about in observed.about["ranks"])
    sums = ([e for e in spans if e["name"] == "wait for gradients"] for spans in main)
    for waits in zip(*sums, strict=True):
        # None is through with a sum before the last has come to it.
        assert min(map(ends, waits)) + 2 * uncertain >= max(e["ts"] for e in waits)


@pytest.mark.parametrize("line", [b"", b"\xff", b"[]", b"{", b'{"otherData": 3', b"[" * 100_000])
def test_a_trace_of_another_program_is_no_reason_to_end(tmp_path, line):
    (tmp_path / timeline.FOLDER).mkdir()
    timeline.path_of(tmp_path, 0).write_bytes(line + b",\n")
    message = timeline._fault_of(lambda: timeline.merge(tmp_path, 1))
    assert "rank-00000.json, line 1" in message
