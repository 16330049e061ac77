"""What layers compute, against a second way to compute it, and what they refuse."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from hpctrain import nn
from hpctrain.errors import UsageError
from hpctrain.nn.dropout import keep_mask

KEY = nn.Key(seed=5, step=7, first=0)


def windows(x, size, stride):
    view = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(1, 2))
    return view[:, ::stride, ::stride]  # (n, oh, ow, c, size, size)


def conv_reference(p, x, stride, padding):
    q = (padding, padding)
    w = windows(np.pad(x, [(0, 0), q, q, (0, 0)]), p["weight"].shape[0], stride)
    return np.einsum("nhwcij,ijco->nhwo", w, p["weight"]) + p["bias"]


FORWARD = [
    (nn.Linear(4), (6,), lambda p, x: np.einsum("ni,io->no", x, p["weight"]) + p["bias"]),
    (nn.ReLU(), (3, 2), lambda p, x: np.where(x > 0, x, 0)),
    (nn.Flatten(), (2, 3, 2), lambda p, x: np.array([one.ravel() for one in x]).reshape(-1, 12)),
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
    p = {n: one.init(generator, one.shape) + 0.5 for n, one in layer.parameters(shape).items()}
    p = {name: one.astype(dtype) for name, one in p.items()}
    x = generator.standard_normal((batch, *shape)).astype(dtype)
    y, _ = layer.forward(p, x, KEY)
    bound = 1e-5 if dtype == "float32" else 1e-13
    assert y.dtype == dtype and y.shape == (batch, *layer.output_shape(shape))
    np.testing.assert_allclose(y, reference(p, x), rtol=0, atol=bound)


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
    g = {name: np.full_like(one, np.nan) for name, one in p.items()}
    y, saved = layer.forward(p, np.ones((2, *shape)), KEY)
    tracemalloc.start()
    layer.backward(p, g, saved, np.ones_like(y), want_dx=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < p["weight"].nbytes / 8
    assert all(np.isfinite(one).all() for one in g.values())


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
]


@pytest.mark.parametrize(("act", "message"), REFUSED)
def test_what_cannot_work_is_refused(act, message):
    with pytest.raises(UsageError, match=message):
        act()


def test_cross_entropy_counts_sums_and_survives_large_logits():
    z = np.array([[1e4, 0.0], [0.0, 0.0], [0.0, 1e4]], np.float32)
    sums, dz = nn.cross_entropy(z, np.array([0, 0, 0]), scale=1.0)
    assert sums == nn.Sums(loss=pytest.approx(np.log(2) + 1e4), correct=2, count=3)
    assert dz.dtype == np.float32
    np.testing.assert_allclose(dz, [[0, 0], [-0.5, 0.5], [-1, 1]])
    assert nn.add(sums, nn.Sums(1.0, 2, 3)).count == 6
