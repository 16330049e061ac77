"""Whole models: sums over shares, the order of gradients, refusals."""

from __future__ import annotations

import functools
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from hpctrain import nn
from hpctrain.collectives import Group
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.transport.threads.ranks import run_ranks

MODELS = {
    "mlp": lambda: nn.MlpOptions(widths=[64, 20, 16, 10], dropout=0.3).build((8, 8), 10),
    "cnn": lambda: nn.CnnOptions(channels=[3, 4], hidden=9, dropout=0.3).build((8, 8), 10),
    "transformer": lambda: nn.TransformerOptions(layers=2, width=8, heads=2, dropout=0.3).build(
        (6,), 256
    ),
    "recompute": lambda: nn.TransformerOptions(
        layers=2, width=8, heads=2, dropout=0.3, recompute=True
    ).build((6,), 256),
}
#: Samples of a batch meet in it, so shares need the sums of all.
NORMED = {
    "resnet": lambda: nn.ResNetOptions(blocks=1, channels=[3, 4]).build((8, 8), 10),
    "resnet-recompute": lambda: nn.ResNetOptions(blocks=1, channels=[3, 4], recompute=True).build(
        (8, 8), 10
    ),
}
CUTS = [[0, 13], [0, 1, 13], [0, 5, 5, 12, 13], [0, 0, 13], [0, 4, 8, 11, 13]]


def made(model, dtype="float64"):
    every = nn.initial_values(model.parameters, 3), nn.initial_values(model.buffers, 3)
    p, buffers = ({k: v.astype(dtype) for k, v in subset.items()} for subset in every)
    return p | buffers, {name: np.full_like(item, np.nan) for name, item in p.items()}


def batch(model, n=13):
    generator = np.random.default_rng(0)
    if model.targets > 1:  # texts
        return tuple(generator.integers(0, 256, (2, n, *model.input_shape)))
    return generator.standard_normal((n, *model.input_shape)), generator.integers(0, 10, n)


def gradient(model, p, x, y, first=0, scale=1 / 13, on_ready=lambda name: None, add=None):
    g = {name: np.full_like(p[name], np.nan) for name in model.parameters}
    key = nn.Key(0, 5, first, sum_over_ranks=add)
    sums = model.gradient(p, g, x, y, scale, key, on_ready)
    return g, sums


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_of_a_batch_is_the_sum_of_those_of_its_shares(name, cut):
    model = MODELS[name]()
    p, _ = made(model)
    x, y = batch(model)
    complete, sums = gradient(model, p, x, y)
    shares = [gradient(model, p, x[a:b], y[a:b], first=a) for a, b in pairwise(cut)]
    check_shares(shares, complete, sums)


def check_shares(shares, complete, sums):
    for k in complete:
        total = sum(g[k] for g, _ in shares)
        np.testing.assert_allclose(total, complete[k], rtol=0, atol=1e-12 * abs(complete[k]).max())
    parts = functools.reduce(nn.add, (item for _, item in shares))
    terms = list(sums)
    packed = nn.losses.pack(parts, terms)
    np.testing.assert_allclose(packed, nn.losses.pack(sums, terms), rtol=1e-12)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", NORMED)
def test_statistics_over_all_ranks_make_the_shares_add_up_too(name, cut):
    model = NORMED[name]()
    (p, _), (x, y) = made(model), batch(model)
    before = {k: p[k].copy() for k in model.buffers}
    complete, sums = gradient(model, p, x, y)

    def on_rank(link):
        a, b = cut[link.rank], cut[link.rank + 1]
        group, own = Group(link), p | {k: v.copy() for k, v in before.items()}

        def add(numbers):
            total = numbers.copy()
            recursive_doubling(group, total, np.add)
            return total

        return gradient(model, own, x[a:b], y[a:b], first=a, add=add), own

    result = run_ranks(len(cut) - 1, on_rank)
    check_shares([share for share, _ in result], complete, sums)
    for k in model.buffers:
        assert np.any(p[k] != before[k])
        for _, own in result:
            np.testing.assert_allclose(own[k], p[k], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("kind", ["transformer", "resnet"])
def test_recomputation_changes_no_bit(kind):
    results = []
    for name in {"transformer": ("transformer", "recompute")}.get(kind, tuple(NORMED)):
        model = (MODELS | NORMED)[name]()
        p, _ = made(model, "float32")
        g, sums = gradient(model, p, *batch(model))
        results.append((g | {k: p[k] for k in model.buffers}, sums))
    (item, sums), (other, same) = results
    assert sums == same and item.keys() == other.keys()
    assert all(np.array_equal(item[k], other[k]) for k in item)


@pytest.mark.parametrize("name", ["transformer", "recompute"])
@pytest.mark.parametrize("pieces", [2, 5])
def test_micro_batches_add_up_and_the_last_one_announces(name, pieces):
    model = MODELS[name]()
    (x, y), replica = batch(model), ModelReplica(model, 3, "float64")
    fired, observed = Counter(), {}
    for replica.micro_batches in (1, pieces):
        fired.clear()
        key = nn.Key(0, 5, 0)
        sums = replica.gradient(Batch.of(x, y), 1 / 13, key, lambda name: fired.update([name]))
        assert set(fired.values()) == {1} and set(fired) == set(model.parameters)
        observed[replica.micro_batches] = (sums, replica.arena.grad.copy())
    complete, added = (nn.losses.pack(observed[n][0], ("loss", "accuracy")) for n in (1, pieces))
    np.testing.assert_allclose(complete, added, rtol=1e-12)
    np.testing.assert_allclose(observed[1][1], observed[pieces][1], rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", MODELS)
def test_a_share_that_starts_at_a_wrong_index_is_seen(name):
    model = MODELS[name]()
    p, _ = made(model)
    x, y = batch(model)
    right, _ = gradient(model, p, x[3:], y[3:], first=3)
    wrong, _ = gradient(model, p, x[3:], y[3:], first=4)
    assert any(abs(right[k] - wrong[k]).max() > 1e-6 for k in right)


@pytest.mark.parametrize("name", MODELS)
def test_each_gradient_is_announced_once_when_final_last_layer_first(name):
    model = MODELS[name]()
    p, g = made(model)
    observed: list[tuple[str, np.ndarray]] = []
    x, y = batch(model)
    model.gradient(
        p, g, x, y, 1.0, nn.Key(0, 0, 0), lambda name: observed.append((name, g[name].copy()))
    )
    assert [name for name, _ in observed] == list(model.parameters)[::-1]
    assert all(np.array_equal(then, g[name]) for name, then in observed)
    assert all(np.isfinite(item).all() for item in g.values())


class Spy(nn.Linear):
    """Notes whether it was asked for the gradient of its input."""

    def backward(self, p, g, saved, dy, want_dx):
        requested.append((self.outputs, want_dx))
        return super().backward(p, g, saved, dy, want_dx)


requested: list[tuple[int, bool]] = []


def test_no_gradient_is_computed_below_the_first_parameters():
    layers = {"relu": nn.ReLU(), "a": Spy(4), "b": Spy(10)}
    model = nn.Model(layers, (3,))
    requested.clear()
    gradient(model, made(model)[0], *batch(model))
    assert requested == [(10, True), (4, False)]


@pytest.mark.parametrize("name", MODELS)
def test_scale_multiplies_the_gradient_and_not_the_sums(name):
    model = MODELS[name]()
    p, _ = made(model)
    x, y = batch(model)
    (once, sums), (twice, same) = (gradient(model, p, x, y, scale=s) for s in (1.0, 2.0))
    assert sums == same and sums["loss"].count == 13 * model.targets
    assert all(np.allclose(twice[k], 2 * once[k], rtol=1e-13, atol=0) for k in once)


@pytest.mark.parametrize("name", MODELS)
def test_float32_parameters_give_the_float64_gradient_within_rounding(name):
    model = MODELS[name]()
    x, y = batch(model)
    x = x.astype(np.float32)
    fine, _ = gradient(model, made(model, "float32")[0], x, y)
    exact, _ = gradient(
        model, {k: v.astype(float) for k, v in made(model, "float32")[0].items()}, x, y
    )
    for k in exact:
        assert fine[k].dtype == np.float32
        assert np.linalg.norm(fine[k] - exact[k]) <= 1e-5 * np.linalg.norm(exact[k])


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float32", "float64"])
def test_nothing_that_is_given_is_written(dtype):
    model = MODELS["mlp"]()
    p, _ = made(model)
    x, y = np.arange(64 * 13).reshape(13, 8, 8).astype(dtype), np.arange(13) % 10
    before = [a.copy() for a in (x, y, *p.values())]
    gradient(model, p, x, y)
    assert all(np.array_equal(a, b) for a, b in zip(before, (x, y, *p.values()), strict=True))


@pytest.mark.parametrize("n", [0, 1, 256, 700])
def test_evaluation_adds_up_pieces_and_drops_nothing(n):
    model = MODELS["mlp"]()
    p, _ = made(model)
    x, y = batch(model, n)
    z = x.reshape(n, 64)
    for i in (1, 2, 3):
        z = z @ p[f"linear{i}.weight"] + p[f"linear{i}.bias"]
        z = np.maximum(z, 0) if i < 3 else z
    softmax = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    loss = -np.log(softmax[np.arange(n), y]).sum()
    expected = [loss, n, (z.argmax(axis=1) == y).sum(), n]
    sums = nn.losses.pack(model.evaluate(p, x, y), ("loss", "accuracy"))
    np.testing.assert_allclose(sums, expected, rtol=1e-12)


def test_initial_values_are_a_function_of_the_seed_alone():
    model = MODELS["cnn"]()
    first = nn.initial_values(model.parameters, 3)
    np.random.default_rng(0).random(10)
    np.random.seed(1)
    nn.initial_values(model.parameters, 4)
    again, other = (nn.initial_values(MODELS["cnn"]().parameters, s) for s in (3, 4))
    assert all(np.array_equal(first[k], again[k]) for k in first)
    assert all(np.any(first[k] != other[k]) for k in first if k.endswith("weight"))


@pytest.mark.parametrize(
    ("layer", "shape", "fan_in"),
    [(nn.Linear(300), (200,), 200), (nn.Conv2d(64, kernel=3), (8, 8, 32), 288)],
)
def test_weights_start_with_variance_2_over_fan_in_and_biases_at_zero(layer, shape, fan_in):
    p = nn.initial_values(layer.parameters(shape), 0)
    assert p["weight"].var() == pytest.approx(2 / fan_in, rel=0.03)
    assert abs(p["weight"].mean()) < 0.01 * p["weight"].std() * 3
    assert p["weight"].dtype == np.float64 and not p["bias"].any()
