"""Staleness: its measurement, and its place in rows, checkpoints and summaries."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from ranks import on_ranks, run_on

from hpctrain import data, engines, nn, optim
from hpctrain.core.run_files import run_folder
from hpctrain.engines.staleness import Staleness, metrics
from hpctrain.engines.synchronous.allreduce import AllReduceEngine
from hpctrain.training.run_options import CheckpointOptions, FitOptions, TraceOptions
from hpctrain.training.trainer import Trainer

KEYS = ("staleness_mean", "staleness_max", "staleness_histogram", "clock_gap_max",
        "dropped_gradients")  # fmt: skip
#: staleness of applied gradients, clock gaps, gradients dropped -> the values of KEYS
COUNTS = {
    "nothing": ([], [], 0, [None, None, None, None, 0]),
    "one": ([3], [0], 0, [3.0, 3, {"3": 1}, 0, 0]),
    "several": ([2, 0, 2, 11, 0], [1, 4, 2], 0, [3.0, 11, {"0": 2, "2": 2, "11": 1}, 4, 0]),
    "only dropped": ([], [], 5, [None, None, None, None, 5]),
}


def counted(observed, gaps, dropped):
    staleness = Staleness(dropped=dropped)
    for item in observed:
        staleness.record_gradient(item)
    for item in gaps:
        staleness.record_gap(item)
    return staleness


@pytest.mark.parametrize("kind", COUNTS)
def test_counts(kind):
    *counts, expected = COUNTS[kind]
    result = metrics(counted(*counts))
    assert list(result.values()) == expected
    assert tuple(result) == KEYS
    reported = json.loads(json.dumps(counted(*counts).to_json()))
    assert metrics(Staleness.from_json(reported)) == result


def test_regimes_that_know_no_staleness_say_null():
    assert metrics(None) == dict.fromkeys(KEYS)


@pytest.mark.parametrize("first", COUNTS)
@pytest.mark.parametrize("second", COUNTS)
def test_two_parts_are_merged_to_what_one_would_have_counted(first, second):
    (a, b, c, _), (d, e, f, _) = COUNTS[first], COUNTS[second]
    assert counted(a, b, c).merge(counted(d, e, f)) == counted(a + d, b + e, c + f)


def stale(step: int) -> int:
    return step * step % 7


class Counting(AllReduceEngine):
    """An all-reduce that says gradients were stale, and lets rank 1 wait for half of its time."""

    def train(self, work, start, until):
        self.staleness = self.staleness or Staleness()
        completed, flags = super().train(work, start, until)
        for step in range(start, completed):
            self.staleness.record_gradient(stale(step))
            self.staleness.record_gap(step % 5)
        return completed, flags


class Options(engines.AllReduce):
    def build(self, world, replica, optimizer):
        return Counting(world, replica, optimizer, self)


def fit(world, options, out, steps, resume=False, callbacks=(), **keys):
    random = np.random.default_rng(0)
    y = np.arange(40) % 3
    train = data.Dataset(random.normal(y[:, None], 1.0, (40, 4)).astype(np.float32), y)
    model = nn.Model({"out": nn.Linear(3)}, (4,))
    trainer = Trainer(model, optim.sgd(0.1), options, world=world, callbacks=callbacks)
    summary = trainer.fit(
        train,
        steps=steps,
        batch=8,
        out=out,
        resume=resume,
        checkpoints=CheckpointOptions(every_steps=6),
        **keys,
        options=FitOptions(interval_steps=3),
    )
    trainer.close()
    return summary


def test_rows_and_summary_count_from_the_first_step_also_when_resumed(tmp_path):
    run = tmp_path / "run"
    run_on("threads", 2, lambda w: fit(w, Options(), run, 8))
    summary = run_on("threads", 3, lambda w: fit(w, Options(), run, 14, resume=True))[0]
    rows = run_folder.rows(run)
    assert [row["step"] for row in rows] == [3, 5, 6, 8, 9, 10, 12, 14]
    assert [row["since_step"] for row in rows] == [0] * 4 + [8] * 4
    for row in [*rows, {**summary, "step": 14}]:
        observed = [stale(step) for step in range(row["step"])]
        histogram = {str(s): n for s, n in sorted(Counter(observed).items())}
        assert [row[key] for key in KEYS] == [
            pytest.approx(np.mean(observed)), max(observed), histogram, min(row["step"] - 1, 4), 0
        ]  # fmt: skip


def test_every_gradient_of_an_asynchronous_run_is_counted(tmp_path):
    run, workers = tmp_path / "run", 3
    for steps, resume in ((8, False), (14, True)):
        run_on("threads", workers + 1, lambda w, a=steps, b=resume:
               fit(w, engines.PsAsync(), run, a, resume=b))  # fmt: skip
    rows = run_folder.rows(run)
    assert [row["since_step"] for row in rows] == [0] * 4 + [8] * 4
    for row in rows:
        assert sum(row["staleness_histogram"].values()) == row["step"] * workers
        assert row["clock_gap_max"] >= 0 and row["dropped_gradients"] == 0


def test_the_trace_tells_the_staleness_of_each_gradient(tmp_path):
    def body(world):
        trace = TraceOptions(enabled=True)
        return fit(world, engines.PsAsync(servers=2), tmp_path / "run", 9, trace=trace)

    summary = run_on("threads", 4, body)[0]
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    reported = [
        event["args"]["staleness"] for event in events if "staleness" in event.get("args", {})
    ]
    assert {int(s): n for s, n in summary["staleness_histogram"].items()} == Counter(reported)


@on_ranks(1, 2, 3, mpi=(2,))
def test_idle_fraction(ranks):
    """The part of its time that a rank's main thread waited; there is none where it is alone."""

    def body(world):
        rows = []
        summary = fit(world, engines.AllReduce(), None, 5, callbacks=[rows.append])
        return world.rank, [*rows, summary]

    for rank, result in ranks(body):
        for row in result:
            assert [row[key] for key in KEYS] == [None] * len(KEYS)
            assert (row["idle_fraction"] is None) == (ranks.size == 1)
        for row in result[:-1] if ranks.size > 1 else []:  # the summary has the means over ranks
            assert len(row["idle_fraction"]) == ranks.size
            assert row["idle_fraction"][rank] == pytest.approx(
                row["wait_s"] / row["wall_s"], abs=1e-4
            )


def test_times_are_those_of_one_training(tmp_path):
    """An engine that trains twice waits and computes in each for less than it lasts."""

    def body(world):
        trainer = Trainer(nn.Model({"out": nn.Linear(3)}, (4,)), optim.sgd(0.1), world=world)
        train = data.Dataset(np.ones((40, 4)), np.arange(40) % 3)
        for steps in (60, 1):
            summary = trainer.fit(train, steps=steps, batch=8)
        trainer.close()
        return summary

    for item in run_on("threads", 2, body):
        assert item["compute_s"] + item["wait_s"] <= item["wall_s"]
