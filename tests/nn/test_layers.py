"""Layers against a second implementation, and their refusals."""

from __future__ import annotations

import math
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from hpctrain import nn
from hpctrain.core.errors import UsageError
from hpctrain.nn.dropout import keep_mask

KEY = nn.Key(seed=5, step=7, first=0)


def windows(x, size, stride):
    view = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(1, 2))
    return view[:, ::stride, ::stride]  # (n, oh, ow, c, size, size)


def conv_reference(p, x, stride, padding):
    q = (padding, padding)
    w = windows(np.pad(x, [(0, 0), q, q, (0, 0)]), p["weight"].shape[0], stride)
    return np.einsum("nhwcij,ijco->nhwo", w, p["weight"]) + p["bias"]


def relu(x):
    return np.where(x > 0, x, 0)


def normed(x, axis, epsilon=1e-5):
    return (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + epsilon)


def batch_norm_reference(p, x):
    if not x.size:
        return x
    return normed(x, tuple(range(x.ndim - 1))) * p["weight"] + p["bias"]


def attention_reference(p, x, heads):
    """One place of one head of one sample after the other."""
    (n, length, width), d = x.shape, x.shape[2] // heads
    qkv = x @ p["qkv_weight"] + p["qkv_bias"]
    mixed = np.zeros_like(x)
    for i, h, t in np.ndindex(n, heads, length):
        q, k, v = (qkv[i, : t + 1, j * width + h * d : j * width + (h + 1) * d] for j in range(3))
        scores = np.exp((k @ q[t] - (k @ q[t]).max()) / np.sqrt(d))
        mixed[i, t, h * d : (h + 1) * d] = scores @ v / scores.sum()
    return mixed @ p["out_weight"] + p["out_bias"]


def subsample_reference(x, channels):
    return np.pad(x[:, ::2, ::2], [(0, 0)] * 3 + [(0, channels - x.shape[3])])


def gelu_reference(x):
    return x / 2 * (1 + np.tanh((x + 0.044715 * x**3) * np.sqrt(2 / np.pi, dtype=x.dtype)))


FORWARD = [
    (nn.Linear(4, per_position=True), (3, 6), lambda p, x: x @ p["weight"] + p["bias"]),
    (nn.Conv2d(3, 3, bias=False), (5, 4, 2), lambda p, x: conv_reference(p | {"bias": 0}, x, 1, 0)),
    (nn.GELU(), (3, 2), lambda p, x: gelu_reference(x)),
    (nn.LayerNorm(), (3, 5), lambda p, x: normed(x, -1) * p["weight"] + p["bias"]),
    (nn.BatchNorm(), (3, 2, 4), batch_norm_reference),
    (nn.Positions(), (3, 4), lambda p, x: x + p["table"]),
    (nn.Unembedding("words", 7), (3, 4), lambda p, x: np.einsum("nlw,ew->nle", x, p["table"])),
    (nn.CausalAttention(2), (5, 6), lambda p, x: attention_reference(p, x, 2)),
    (nn.MeanPool(), (3, 2, 4), lambda p, x: x.reshape(-1, 6, 4).sum(1) / 6),
    (nn.Subsample(2, 5), (5, 4, 3), lambda p, x: subsample_reference(x, 5)),
    (nn.Chain({"a": nn.ReLU(), "b": nn.Flatten()}), (2, 3), lambda p, x: relu(x).reshape(-1, 6)),
    (nn.Residual({"a": nn.ReLU()}), (4,), lambda p, x: relu(x) + x),
    (nn.Recompute(nn.ReLU()), (4,), lambda p, x: relu(x)),
    (nn.Linear(4), (6,), lambda p, x: np.einsum("ni,io->no", x, p["weight"]) + p["bias"]),
    (nn.ReLU(), (3, 2), lambda p, x: relu(x)),
    (nn.Flatten(), (2, 3, 2), lambda p, x: np.array([item.ravel() for item in x]).reshape(-1, 12)),
    (nn.AddChannel(), (2, 3), lambda p, x: x[:, :, :, np.newaxis]),
    (nn.Conv2d(3, 3), (5, 4, 2), lambda p, x: conv_reference(p, x, 1, 0)),
    (nn.Conv2d(3, 2, stride=2, padding=1), (5, 4, 2), lambda p, x: conv_reference(p, x, 2, 1)),
    (nn.MaxPool2d(), (4, 5, 2), lambda p, x: windows(x, 2, 2).max(axis=(4, 5))),
    (nn.MaxPool2d(3, stride=2), (7, 6, 2), lambda p, x: windows(x, 3, 2).max(axis=(4, 5))),
    (nn.Dropout(0.0), (4,), lambda p, x: x),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("batch", [0, 1, 5])
@pytest.mark.parametrize(("layer", "shape", "reference"), FORWARD)
def test_the_output_is_that_of_the_plain_formula(layer, shape, reference, batch, dtype):
    generator = np.random.default_rng(batch)
    p = {n: item.init(generator, item.shape) + 0.5 for n, item in layer.parameters(shape).items()}
    p = {name: item.astype(dtype) for name, item in p.items()}
    x = generator.standard_normal((batch, *shape)).astype(dtype)
    y, _ = layer.forward(p, x, KEY)
    bound = 1e-5 if dtype == "float32" else 1e-13
    assert y.dtype == dtype and y.shape == (batch, *layer.output_shape(shape))
    np.testing.assert_allclose(y, reference(p, x), rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("batch", [0, 3])
def test_an_embedding_looks_its_numbers_up(batch, dtype):
    p = {"table": np.random.default_rng(0).standard_normal((7, 2)).astype(dtype)}
    x = np.random.default_rng(1).integers(0, 7, (batch, 5))
    y, saved = nn.Embedding(7, 2).forward(p, x.astype(dtype), KEY)
    assert y.dtype == dtype and y.shape == (batch, 5, 2)
    assert all(np.array_equal(y[i], p["table"][x[i]]) for i in np.ndindex(x.shape))
    g = {"table": np.full_like(p["table"], np.nan)}
    nn.Embedding(7, 2).backward(p, g, saved, np.ones_like(y), False)
    assert np.array_equal(g["table"][:, 0], np.bincount(x.ravel(), minlength=7))


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.MaxPool2d()])
def test_not_a_number_is_passed_on(layer):
    x = np.full((1, 2, 2, 1), -1.0)
    x[0, 1, 0, 0] = np.nan
    assert np.isnan(layer.forward({}, x, KEY)[0]).any()


def test_equal_values_in_a_window_get_the_gradient_once():
    x = np.zeros((1, 4, 4, 1))
    dx = nn.MaxPool2d().backward(
        {}, {}, nn.MaxPool2d().forward({}, x, KEY)[1], np.ones((1, 2, 2, 1)), True
    )
    assert dx.sum() == 4 and dx[0, ::2, ::2, 0].sum() == 4


DENSE, CONV = nn.Linear(512), nn.Conv2d(64, kernel=3)


@pytest.mark.parametrize(("layer", "shape"), [(DENSE, (512,)), (CONV, (3, 3, 512))])
def test_gradients_are_written_in_place_without_arrays_of_parameter_size(layer, shape):
    p = nn.initial_values(layer.parameters(shape), 0)
    g = {name: np.full_like(item, np.nan) for name, item in p.items()}
    y, saved = layer.forward(p, np.ones((2, *shape)), KEY)
    tracemalloc.start()
    layer.backward(p, g, saved, np.ones_like(y), want_dx=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < p["weight"].nbytes / 8
    assert all(np.isfinite(item).all() for item in g.values())


class TestDropout:
    WHOLE = keep_mask(KEY, 6000, 21, rate=0.3)

    @pytest.mark.parametrize("cuts", [[0, 6000], [0, 1, 1, 7, 6000]])
    def test_a_sample_keeps_its_mask_wherever_it_is(self, cuts):
        rows = [keep_mask(KEY._replace(first=a), b - a, 21, rate=0.3) for a, b in pairwise(cuts)]
        assert np.array_equal(np.concatenate(rows), self.WHOLE)

    @pytest.mark.parametrize("change", [{"seed": 6}, {"step": 8}, {"layer": 1}, {"first": 1}])
    def test_the_mask_depends_on_each_part_of_the_key(self, change):
        other = keep_mask(KEY._replace(**change), 6000, 21, rate=0.3)
        # Independent masks agree where both keep or both drop.
        assert np.mean(other == self.WHOLE) == pytest.approx(0.7**2 + 0.3**2, abs=0.01)

    def test_the_share_that_is_kept_is_right_in_rows_and_columns(self):
        sigma = np.sqrt(0.3 * 0.7 / 6000)
        assert abs(self.WHOLE.mean(axis=0) - 0.7).max() < 4 * sigma
        assert abs(self.WHOLE.mean() - 0.7) < 4 * sigma / np.sqrt(21)

    def test_kept_values_grow_and_evaluation_changes_nothing(self):
        x = np.ones((50, 4), np.float32)
        y, _ = nn.Dropout(0.75).forward({}, x, KEY)
        assert y.dtype == np.float32 and set(np.unique(y)) == {0, 4}
        assert nn.Dropout(0.75).forward({}, x, None)[0] is x


REFUSED = [
    (
        lambda: nn.Linear(2, per_position=True).output_shape((2,)),
        r"vectors at positions .* seen \(2,\)",
    ),
    (lambda: nn.CausalAttention(0), "heads must be at least 1"),
    (lambda: nn.CausalAttention(3).output_shape((5, 4)), r"multiple of 3 heads, seen \(5, 4\)"),
    (lambda: nn.Embedding(0, 1), "entries must be at least 1"),
    (lambda: nn.Embedding(7, 2).output_shape((2, 2)), r"expected numbers .* seen \(2, 2\)"),
    (
        lambda: nn.Embedding(7, 2).forward({"table": np.ones((7, 2))}, np.array([[7]]), KEY),
        "numbers in 0 .. 6, seen 7 .. 7",
    ),
    (lambda: nn.Positions().output_shape((2,)), r"vectors at positions .* seen \(2,\)"),
    (lambda: nn.MeanPool().output_shape((2,)), r"expected images .* seen \(2,\)"),
    (lambda: nn.Subsample(2, 3).output_shape((4, 4, 5)), r"at most 3 channels\), seen \(4, 4, 5\)"),
    (
        lambda: nn.Residual({"a": nn.Linear(3)}).output_shape((4,)),
        r"body ends in \(3,\) but the shortcut in \(4,\)",
    ),
    (
        lambda: nn.mean_squared_error(np.ones((3, 2)), np.ones(3)),
        r"targets \(n, 2\), .* seen \(3,\)",
    ),
    (lambda: nn.Linear(0), "outputs must be at least 1, seen 0"),
    (lambda: nn.Conv2d(1, kernel=0), "kernel must be at least 1"),
    (lambda: nn.Conv2d(1, kernel=3, padding=-1), "padding must be at least 0"),
    (lambda: nn.MaxPool2d(stride=0), "stride must be at least 1"),
    (lambda: nn.Dropout(1.0), r"rate must be in \[0, 1\), seen 1.0"),
    (lambda: nn.Linear(2).output_shape((2, 2)), r"expected vectors \(features,\), seen \(2, 2\)"),
    (lambda: nn.Conv2d(1, 3).output_shape((4, 4)), r"expected images .* seen \(4, 4\)"),
    (lambda: nn.Conv2d(1, 3).output_shape((2, 9, 1)), r"at least 3 x 3, seen \(2, 9, 1\)"),
    (lambda: nn.AddChannel().output_shape((2, 2, 1)), r"expected grey images .* seen \(2, 2, 1\)"),
    (lambda: nn.cross_entropy(np.ones((3, 2)), np.ones(2, int)), r"seen \(3, 2\) and \(2,\)"),
    (lambda: nn.cross_entropy(np.ones((2, 3)), np.array([0, 3])), r"label 3 .* 0 .. 2, since"),
    (lambda: nn.cross_entropy(np.ones((2, 3)), np.array([-1, 0])), "label -1 is out of range"),
]


@pytest.mark.parametrize(("act", "message"), REFUSED)
def test_what_cannot_work_is_refused(act, message):
    with pytest.raises(UsageError, match=message):
        act()


def test_cross_entropy_counts_sums_and_survives_large_logits():
    z = np.array([[1e4, 0.0], [0.0, 0.0], [0.0, 1e4]], np.float32)
    sums, dz = nn.cross_entropy(z, np.array([0, 0, 0]), scale=1.0)
    assert sums["loss"] == pytest.approx((np.log(2) + 1e4, 3))
    assert sums["accuracy"] == (2, 3)
    assert dz.dtype == np.float32
    np.testing.assert_allclose(dz, [[0, 0], [-0.5, 0.5], [-1, 1]])
    assert nn.add(sums, {"loss": nn.Total(1.0, 3)})["loss"].count == 6


def test_mean_squared_error_is_a_mean_over_features_and_a_sum_over_targets():
    z, y = np.array([[1.0, 2.0], [3.0, 5.0]]), np.array([[1.0, 0.0], [0.0, 4.0]])
    sums, dz = nn.mean_squared_error(z, y, scale=0.5)
    assert sums == {"loss": (2 + 5, 2), "target": (5, 4), "target_squared": (17, 4)}
    np.testing.assert_allclose(dz, 0.5 * (z - y))


def test_gelu_is_near_the_form_with_erf():
    x = np.linspace(-6, 6, 1001)
    erf = np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x])
    assert abs(nn.GELU().forward({}, x, None)[0] - erf).max() < 5e-4


def test_no_place_sees_what_comes_after_it():
    layer, x = nn.CausalAttention(2), np.random.default_rng(0).standard_normal((1, 6, 4))
    p = {k: v + 1 for k, v in nn.initial_values(layer.parameters((6, 4)), 0).items()}
    p["qkv_weight"] += np.random.default_rng(1).standard_normal((4, 12))
    before = layer.forward(p, x, KEY)[0]
    x[0, 3] += 1
    after = layer.forward(p, x, KEY)[0]
    assert np.array_equal(before[0, :3], after[0, :3])
    assert (before[0, 3:] != after[0, 3:]).any(axis=1).all()


def test_a_chain_computes_no_gradient_that_nobody_needs():
    requests = []

    class Recorded(nn.Linear):
        def backward(self, p, g, saved, dy, want_dx):
            requests.append(want_dx)
            return super().backward(p, g, saved, dy, want_dx)

    chain = nn.Chain({"flat": nn.Flatten(), "a": Recorded(3), "b": Recorded(2)})
    p = nn.initial_values(chain.parameters((2, 2)), 0)
    for want_dx in (False, True):
        y, saved = chain.forward(p, np.ones((5, 2, 2)), None)
        dx = chain.backward(p, {k: np.empty_like(v) for k, v in p.items()}, saved, y, want_dx)
    assert requests == [True, False, True, True] and dx.shape == (5, 2, 2)
