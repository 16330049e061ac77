"""The linear scaling rule: with a batch per rank, the rate grows with the ranks on request."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import run_on

from hpctrain.core.errors import UsageError
from hpctrain.training import recipe, runs

WEAK = ["optimizer.batch=", "optimizer.batch_per_rank=32", "optimizer.rate=0.1"]
RATES = [
    (WEAK, 8, 0.1),
    ([*WEAK, "optimizer.base_batch=32"], 1, 0.1),
    ([*WEAK, "optimizer.base_batch=32"], 3, 0.3),
    ([*WEAK, "optimizer.base_batch=128"], 2, 0.05),
    (["optimizer.rate=0.1"], 8, 0.1),
]


@pytest.mark.parametrize(("change", "ranks", "rate"), RATES)
def test_the_rate(change, ranks, rate):
    spec = recipe.load("digits", change)
    assert spec.optimizer.rate * spec.batch.rate_factor(ranks) == pytest.approx(rate)


def test_a_fixed_batch_leaves_nothing_to_scale():
    with pytest.raises(UsageError, match="base_batch: expected batch_per_rank beside it"):
        recipe.load("digits", ["optimizer.base_batch=32"])


def test_two_ranks_train_as_one_with_twice_the_batch_and_the_rate(tmp_path):
    short = ["run.steps=8", "run.epochs=", "run.precision=float64"]
    two = recipe.load("digits", [*WEAK, *short, "optimizer.base_batch=32"])
    item = recipe.load("digits", ["optimizer.batch=64", "optimizer.rate=0.2", *short])
    weak = run_on("threads", 2, lambda w: runs.train(two, w, tmp_path / "two", False))[0]
    strong = run_on("threads", 1, lambda w: runs.train(item, w, tmp_path / "one", False))[0]
    assert weak["train_loss"] == pytest.approx(strong["train_loss"], rel=1e-9)
    assert np.isfinite(weak["train_loss"])
