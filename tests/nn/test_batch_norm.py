"""Batch normalization: running statistics, and sums over the shares of a batch."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain import nn

KEY = nn.Key(seed=5, step=7, first=0)


@pytest.mark.parametrize("momentum", [0.1, 0.5])
def test_running_statistics_are_those_of_the_batches_and_evaluation_uses_them(momentum):
    layer, generator = nn.BatchNorm(momentum), np.random.default_rng(0)
    p = nn.initial_values(layer.parameters((3, 2)), 0) | {"weight": np.array([2.0, 3.0])}
    mean, variance = np.zeros(2), np.ones(2)
    for n in (4, 2, 7):
        x = 5 + 2 * generator.standard_normal((n, 3, 2))
        layer.forward(p, x, KEY)
        flat = x.reshape(-1, 2)
        mean = (1 - momentum) * mean + momentum * flat.mean(0)
        variance = (1 - momentum) * variance + momentum * flat.var(0, ddof=1)
    layer.forward(p, x, KEY._replace(recomputed=True))  # recomputed: seen before
    np.testing.assert_allclose(p["mean"], mean, rtol=1e-13)
    np.testing.assert_allclose(p["variance"], variance, rtol=1e-13)
    y, _ = layer.forward(p, x, None)
    np.testing.assert_allclose(y, (x - mean) / np.sqrt(variance + 1e-5) * [2, 3], rtol=1e-12)


def test_a_step_without_samples_moves_no_statistics():
    layer = nn.BatchNorm()
    p = nn.initial_values(layer.parameters((2,)), 0)
    layer.forward(p, np.ones((0, 2)), KEY)
    assert (p["mean"] == 0).all() and (p["variance"] == 1).all()


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("float64", 1e-9)])
def test_values_far_from_zero_keep_their_variance(dtype, bound):
    layer = nn.BatchNorm()
    x = (1000 + np.random.default_rng(0).standard_normal((4096, 3))).astype(dtype)
    p = {k: v.astype(dtype) for k, v in nn.initial_values(layer.parameters((3,)), 0).items()}
    y, _ = layer.forward(p, x, KEY)
    exact = x.astype(float).var(0)
    np.testing.assert_allclose(y.std(0, dtype=float), np.sqrt(exact / (exact + 1e-5)), rtol=bound)
