"""LayerNorm on a device: the CUDA source, compiled for the host, against NumPy."""

from __future__ import annotations

import numpy as np
import on_host
import pytest
from cases import dtype_of

from hpctrain import nn
from hpctrain.core import xp

CLOSE = {"float32": 2e-5, "float64": 1e-11, "float16": 4e-3, "bfloat16": 4e-2}
SHAPES = [(5, 4, 3), (7, 16), (1, 9, 5), (300, 4), (3, 700), (2, 1), (0, 4, 3)]


@pytest.fixture(params=[False, True], ids=["told in Python", "source"])
def compiled(request, gpu, monkeypatch):
    """Run kernels as the stand-in tells them, and their sources by the host's compiler."""
    if request.param:
        on_host.install(monkeypatch)


def passed(to, x, dy, p, want_dx=True):
    """Return all that a pass through the layer leaves, on the host in 64 bits."""
    layer, local = nn.LayerNorm(), {name: to(a) for name, a in p.items()}
    g = {name: to(np.full_like(a, np.nan)) for name, a in p.items()}
    y, saved = layer.forward(local, to(x), nn.Key(0, 0, 0))
    dx = layer.backward(local, g, saved, to(dy), want_dx)
    result = {"y": y, **({"dx": dx} if want_dx else {}), **g}
    return {name: xp.to_host(a).astype(np.float64) for name, a in result.items()}


@pytest.mark.parametrize("dtype", CLOSE)
def test_it_is_that_of_the_host(compiled, gpu, dtype):
    import cupy

    draw = np.random.default_rng(0).standard_normal
    for shape in SHAPES:
        x, dy = ((draw(shape) + o).astype(dtype_of(dtype)) for o in (3, 0))
        kind = "float64" if dtype == "float64" else "float32"
        p = {name: draw(shape[-1]).astype(kind) for name in ("weight", "bias")}
        # The host computes in 64 bits: what is left is the device's own rounding.
        wide = {name: a.astype(np.float64) for name, a in p.items()}
        reported = passed(np.asarray, x.astype("f8"), dy.astype("f8"), wide)
        gpu.counts.clear()
        result = passed(cupy.asarray, x, dy, p)
        assert gpu.counts["raw kernel"] == (4 if len(x) else 1)
        for name, expected in reported.items():
            assert result[name].shape == expected.shape
            maximum = max(abs(expected).max(), 1) if expected.size else 1
            np.testing.assert_allclose(result[name], expected, rtol=0, atol=CLOSE[dtype] * maximum)


def test_a_first_layer_has_no_dx(compiled):
    import cupy

    x, p = np.ones((3, 4), "float32"), {"weight": np.ones(4, "f4"), "bias": np.ones(4, "f4")}
    result = passed(cupy.asarray, x, x, p, want_dx=False)
    assert (result["y"] == 1).all() and (result["bias"] == 3).all() and not result["weight"].any()
