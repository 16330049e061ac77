"""The coefficient of determination at large offsets of the targets, against exact fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from ranks import run_on

from hpctrain import nn, optim
from hpctrain.training.trainer import Trainer

ROWS = 2000  # more than the rows whose mean is the offset of the sums
GENERATOR = np.random.default_rng(0)
NOISE = GENERATOR.normal(size=ROWS)


def exact_r2(outputs, targets):
    outputs, targets = ([Fraction(float(v)) for v in x.reshape(-1)] for x in (outputs, targets))
    mean = sum(targets) / len(targets)
    errors = sum((o - t) ** 2 for o, t in zip(outputs, targets, strict=True))
    return float(1 - errors / sum((t - mean) ** 2 for t in targets))


@pytest.mark.parametrize("order", ["mixed", "rising"])  # rising: the first rows lie apart
@pytest.mark.parametrize("offset", [0.0, -1e4, 1e8])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_r2_is_right_at_any_offset(dtype, offset, order):
    spread = 1.0 if dtype == "float64" or abs(offset) < 1e8 else 1e3  # float32 has steps of 8 here
    y = (offset + spread * (np.sort(NOISE) if order == "rising" else NOISE)).astype(dtype)
    x = np.stack([y - offset, GENERATOR.normal(size=ROWS)], axis=1).astype(dtype) / spread

    def train(world):
        model = nn.Model([nn.Linear(1)], input_shape=2, loss="mean_squared_error")
        trainer = Trainer(model, optim.sgd(rate=1e-9), precision=dtype, world=world)
        params = trainer.replica.arena.views(trainer.replica.arena.param)
        for name, p in params.items():
            p[...] = offset if name.endswith("bias") else np.array([[0.99 * spread], [0.1]])
        evaluated = trainer.evaluate((x, y))["r2"]
        summary = trainer.fit((x, y), steps=1, batch=ROWS, evaluate=(x, y))
        return evaluated, summary["test_r2"], trainer.predict(x)

    for evaluated, tested, outputs in run_on("threads", 2, train):
        expected = exact_r2(outputs, y)
        limit = 1e-9 if dtype == "float64" else 2e-3
        assert 0.9 < expected < 1
        assert tested == pytest.approx(expected, rel=limit)
        assert evaluated == pytest.approx(expected, abs=0.01)
