"""Losses of ranks in the summary and the rows of a run, also of spares that wake up late."""

from __future__ import annotations

import json

import numpy as np
import pytest

import hpctrain as ht
from hpctrain.training.run_options import FitOptions
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

STEPS = 80
SAMPLES = np.random.default_rng(0).standard_normal((64, 8), np.float32), np.arange(64) % 3
#: ranks that train, spares, n-th calls of the links at which ranks are killed
KILLS = {
    "none": (2, 1, {}),
    "without a spare": (3, 0, {1: 600}),
    "the first rank, then the spare in its place": (2, 2, {0: 300, 2: 600}),
    "one after the other, until no first rank is left": (2, 3, {0: 250, 1: 550, 2: 650}),
}


def train(link, spares, out):
    world = over_threads(link, spares=spares)
    model = ht.nn.Model([ht.nn.Linear(3)], input_shape=8)
    trainer = ht.Trainer(model, "sgd", world=world)
    return trainer.fit(
        SAMPLES, steps=STEPS, batch=16, out=out, options=FitOptions(interval_steps=5)
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", KILLS)
def test_each_loss_is_in_one_recovery_and_one_row(name, tmp_path):
    ranks, spares, kills = KILLS[name]
    results = run_ranks(ranks + spares, lambda link: train(link, spares, tmp_path), 20.0, kills)
    summary = next(result for result in results if result is not None)
    recoveries = summary["recoveries"]
    assert sorted(rank for entry in recoveries for rank in entry["ranks"]) == sorted(kills)
    joined = [rank for entry in recoveries for rank in entry["spares"]]
    assert joined == list(range(ranks, ranks + min(spares, len(kills))))
    assert summary["spares_used"] == len(joined)
    assert all(entry["steps_redone"] == 0 and entry["lost_s"] > 0 for entry in recoveries)
    assert summary["lost_s"] == pytest.approx(sum(entry["lost_s"] for entry in recoveries))
    assert summary["ettr"] == pytest.approx(1 - summary["lost_s"] / summary["wall_s"])
    assert summary["steps"] == STEPS
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["steps"] for row in rows) == STEPS
    assert sorted(rank for row in rows for rank in row.get("lost_ranks", [])) == sorted(kills)
