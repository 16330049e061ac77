"""Whole models: shares add up, gradients are announced in order, what does not fit is refused."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pydantic
import pytest

from hpctrain import nn
from hpctrain.config import read_kind
from hpctrain.errors import UsageError

MODELS = {
    "mlp": lambda: nn.MlpOptions(widths=[64, 20, 16, 10], dropout=0.3).build((8, 8), 10),
    "cnn": lambda: nn.CnnOptions(channels=[3, 4], hidden=9, dropout=0.3).build((8, 8), 10),
}
CUTS = [[0, 13], [0, 1, 13], [0, 5, 5, 12, 13], [0, 0, 13], [0, 4, 8, 11, 13]]


def made(model, dtype="float64"):
    p = {k: v.astype(dtype) for k, v in nn.initial_values(model.parameters, 3).items()}
    return p, {name: np.full_like(one, np.nan) for name, one in p.items()}


def batch(model, n=13):
    generator = np.random.default_rng(0)
    return generator.standard_normal((n, *model.input_shape)), generator.integers(0, 10, n)


def gradient(model, p, x, y, first=0, scale=1 / 13, dtype="float64", on_ready=lambda name: None):
    g = {name: np.full_like(one, np.nan) for name, one in p.items()}
    sums = model.gradient(p, g, x, y, scale, nn.Key(0, 5, first), on_ready)
    return g, sums


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_of_a_batch_is_the_sum_of_those_of_its_shares(name, cut):
    model = MODELS[name]()
    p, _ = made(model)
    x, y = batch(model)
    whole, sums = gradient(model, p, x, y)
    total, parts = {k: np.zeros_like(v) for k, v in p.items()}, nn.Sums(0.0, 0, 0)
    for a, b in pairwise(cut):
        g, one = gradient(model, p, x[a:b], y[a:b], first=a)
        total, parts = {k: total[k] + g[k] for k in total}, nn.add(parts, one)
    for k in whole:
        np.testing.assert_allclose(total[k], whole[k], rtol=0, atol=1e-12 * abs(whole[k]).max())
    assert parts == pytest.approx(sums, rel=1e-12)


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
    seen = []
    x, y = batch(model)
    model.gradient(
        p, g, x, y, 1.0, nn.Key(0, 0, 0), lambda name: seen.append((name, g[name].copy()))
    )
    assert [name for name, _ in seen] == list(model.parameters)[::-1]
    assert all(np.array_equal(then, g[name]) for name, then in seen)
    assert all(np.isfinite(one).all() for one in g.values())


class Spy(nn.Linear):
    """Notes whether it was asked for the gradient of its input."""

    def backward(self, p, g, saved, dy, want_dx):
        asked.append((self.outputs, want_dx))
        return super().backward(p, g, saved, dy, want_dx)


asked: list[tuple[int, bool]] = []


def test_no_gradient_is_computed_below_the_first_parameters():
    layers = {"relu": nn.ReLU(), "a": Spy(4), "b": Spy(10)}
    model = nn.Model(layers, (3,))
    asked.clear()
    gradient(model, made(model)[0], *batch(model))
    assert asked == [(10, True), (4, False)]


@pytest.mark.parametrize("name", MODELS)
def test_scale_multiplies_the_gradient_and_not_the_sums(name):
    model = MODELS[name]()
    p, _ = made(model)
    x, y = batch(model)
    (once, sums), (twice, same) = (gradient(model, p, x, y, scale=s) for s in (1.0, 2.0))
    assert sums == same and sums.count == 13
    assert all(np.allclose(twice[k], 2 * once[k], rtol=1e-13, atol=0) for k in once)


@pytest.mark.parametrize("name", MODELS)
def test_float32_parameters_give_the_float64_gradient_within_rounding(name):
    model = MODELS[name]()
    x, y = batch(model)
    x = x.astype(np.float32)
    fine, _ = gradient(model, made(model, "float32")[0] | {}, x, y)
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
    expected = nn.Sums(loss, int((z.argmax(axis=1) == y).sum()), n)
    assert model.evaluate(p, x, y) == pytest.approx(expected, rel=1e-12)


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


def chain(shape, **layers):
    return lambda: nn.Model(layers, shape)


POOLS = {"p1": nn.MaxPool2d(), "p2": nn.MaxPool2d()}
MLP, CNN = nn.MlpOptions(widths=[64, 10]), nn.CnnOptions(channels=[2, 2], hidden=3)
REFUSED = {
    "linear after conv": (
        chain((4, 4, 1), conv=nn.Conv2d(2, 3), out=nn.Linear(3)),
        r"'out' \(Linear\) cannot follow 'conv' \(Conv2d\): expected vectors .* seen \(2, 2, 2\)",
    ),
    "conv first on vectors": (
        chain((16,), conv=nn.Conv2d(2, 3)),
        r"'conv' \(Conv2d\) cannot follow the input: expected images .* seen \(16,\)",
    ),
    "pooled to nothing": (
        chain((2, 2, 1), **POOLS),
        r"'p2' \(MaxPool2d\) cannot follow 'p1' \(MaxPool2d\): .* at least 2 x 2, seen \(1, 1, 1\)",
    ),
    "nothing to train": (chain((2,), relu=nn.ReLU()), "needs a layer with parameters"),
    "mlp features": (
        lambda: MLP.build((8, 9), 10),
        r"expected 72 first .* seen 64; set .*\[72, 10\]",
    ),
    "mlp classes": (lambda: MLP.build((64,), 11), r"at least 11 last .* seen 10; set .*\[64, 11\]"),
    "cnn of nothing": (lambda: CNN.build(None, 10), "expected the shape of images and classes"),
    "cnn of vectors": (lambda: CNN.build((64,), 10), r"expected images .* seen \(64,\); .*'mlp'"),
    "cnn of small images": (lambda: CNN.build((3, 3), 10), r"'pool2' .* seen \(1, 1, 2\)"),
    "recipe": (lambda: read_kind(nn.MODELS, {"kind": "mpl", "widths": []}, "model"), "mean 'mlp'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_does_not_fit_is_refused(name):
    act, message = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        act()


@pytest.mark.parametrize(
    "table", [{"widths": [3]}, {"widths": [3, 0]}, {"widths": [3, 2], "dropout": 1}]
)
def test_options_out_of_range_are_refused(table):
    with pytest.raises(pydantic.ValidationError):
        nn.MlpOptions(**table)


def test_samples_of_another_shape_are_refused():
    model = MODELS["cnn"]()
    p, _ = made(model)
    with pytest.raises(UsageError, match=r"samples of shape \(8, 8\), seen \(64,\)"):
        model.evaluate(p, np.ones((2, 64)), np.zeros(2, int))


def test_a_wider_last_layer_than_classes_is_allowed():
    assert MLP.build((8, 8), 7).output_shape == (10,)
