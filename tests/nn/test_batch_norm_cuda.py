"""BatchNorm on a device: the CUDA source, compiled for the host, against NumPy."""

from __future__ import annotations

import numpy as np
import on_host
import pytest
from cases import dtype_of

from hpctrain import nn
from hpctrain.core import xp

CLOSE = {"float32": 2e-5, "float64": 1e-11, "float16": 4e-3, "bfloat16": 4e-2}
#: samples and their shape; the last of many channels
SHAPES = [(5, (4, 3, 2)), (7, (3, 16)), (1, (9, 5)), (300, (4,)), (2, (2, 700)), (0, (4, 3))]


@pytest.fixture(params=[False, True], ids=["told in Python", "source"])
def compiled(request, gpu, monkeypatch):
    """Run kernels as the stand-in tells them, and their sources by the host's compiler."""
    if request.param:
        on_host.install(monkeypatch)


def twice(numbers):
    """Add what another rank has, which has the same share."""
    return numbers + numbers


def passed(to, x, dy, p, key, want_dx=True):
    """Return all that a pass through the layer leaves, on the host in 64 bits."""
    layer = nn.BatchNorm()
    local = {name: to(a.copy()) for name, a in p.items()}
    g = {name: to(np.full_like(p[name], np.nan)) for name in ("weight", "bias")}
    y, saved = layer.forward(local, to(x), key)
    dx = layer.backward(local, g, saved, to(dy), want_dx)
    result = {"y": y, **({} if dx is None else {"dx": dx}), **g, **local}
    return {name: xp.to_host(a).astype(np.float64) for name, a in result.items()}


def drawn(n, shape, dtype, offset=3.0):
    draw, wide = np.random.default_rng(0).standard_normal, "float64" if dtype == "float64" else "f4"
    x, dy = ((draw((n, *shape)) + o).astype(dtype_of(dtype)) for o in (offset, 0))
    p = {name: draw(shape[-1]).astype(wide) for name in ("weight", "bias", "mean")}
    return x, dy, p | {"variance": draw(shape[-1]).astype(wide) ** 2}


@pytest.mark.parametrize("add", [None, twice])
@pytest.mark.parametrize("dtype", CLOSE)
def test_it_is_that_of_the_host(compiled, gpu, dtype, add):
    import cupy

    for n, shape in SHAPES:
        x, dy, p = drawn(n, shape, dtype)
        key = nn.Key(0, 0, 0, sum_over_ranks=add)
        # The host computes in 64 bits: what is left is the device's own rounding.
        wide = [a.astype(np.float64) for a in (x, dy)]
        reported = passed(np.asarray, *wide, {name: a.astype("f8") for name, a in p.items()}, key)
        gpu.counts.clear()
        result = passed(cupy.asarray, x, dy, p, key)
        assert gpu.counts["raw kernel"] == (7 if n else 2)
        for name, expected in reported.items():
            assert result[name].shape == expected.shape
            maximum = max(abs(expected).max(), 1) if expected.size else 1
            np.testing.assert_allclose(result[name], expected, rtol=0, atol=CLOSE[dtype] * maximum)


def test_values_far_from_zero_keep_their_variance(compiled):
    import cupy

    x, dy, p = drawn(200, (3,), "float32", offset=1e4)
    key = nn.Key(0, 0, 0)
    reported = passed(np.asarray, x.astype("f8"), dy.astype("f8"), p, key)
    result = passed(cupy.asarray, x, dy, p, key)
    np.testing.assert_allclose(result["y"], reported["y"], atol=1e-4)
    np.testing.assert_allclose(result["variance"], reported["variance"], rtol=1e-5)


def test_a_pass_made_again_moves_nothing_and_a_first_layer_has_no_dx(compiled):
    import cupy

    x, dy, p = drawn(6, (2, 3), "float32")
    result = passed(cupy.asarray, x, dy, p, nn.Key(0, 0, 0, recomputed=True), want_dx=False)
    assert "dx" not in result
    assert (result["mean"] == p["mean"]).all() and (result["variance"] == p["variance"]).all()
    once = passed(cupy.asarray, x, dy, p, nn.Key(0, 0, 0))
    assert (once["mean"] != p["mean"]).all() and (once["weight"] == result["weight"]).all()


def test_what_is_not_a_number_stays_so(compiled):
    import cupy

    x, dy, p = drawn(6, (2, 3), "float32")
    x[2, 1, 1] = np.nan
    result = passed(cupy.asarray, x, dy, p, nn.Key(0, 0, 0))
    assert np.isnan(result["y"][..., 1]).all() and not np.isnan(result["y"][..., 0]).any()
