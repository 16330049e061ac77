"""Functions of JAX where a rank has no samples of the last batch."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax", reason="needs JAX: pip install 'hpctrain[jax]'")

from guests.plain import FEATURES, make_samples
from ranks import run_on

import hpctrain as ht

pytestmark = pytest.mark.either


def test_ranks_without_samples_of_the_last_batch():
    x, _ = make_samples(samples=10)

    def loss(params, x, y):
        return ((x @ params["w"] - y) ** 2).mean()

    def train(world):
        params = {"w": np.zeros(FEATURES, np.float32)}
        with ht.jax.Trainer(loss, params, ht.optim.sgd(rate=0.1), world=world) as trainer:
            trainer.fit((x.astype(np.float32), x[:, 0].astype(np.float32)), steps=2, batch=8)
            return np.asarray(trainer.params["w"])

    single, *several = (weights for ranks in (1, 4) for weights in run_on("threads", ranks, train))
    assert max(abs(weights - single).max() for weights in several) <= 1e-6
