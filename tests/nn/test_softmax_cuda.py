"""Attention's softmax on a device: the CUDA source, compiled for the host, against NumPy."""

from __future__ import annotations

import numpy as np
import on_host
import pytest
from cases import dtype_of

from hpctrain.nn import attention

CLOSE = {"float32": 1e-5, "float64": 1e-13, "float16": 1e-5, "bfloat16": 1e-5}
#: samples, heads, length: of one place, of more than threads, more rows than blocks, no sample
SHAPES = [(2, 3, 5), (1, 1, 1), (1, 2, 300), (3, 16, 100), (0, 2, 4)]


@pytest.fixture(params=[False, True], ids=["told in Python", "source"])
def compiled(request, gpu, monkeypatch):
    """Run kernels as the stand-in tells them, and their sources by the host's compiler."""
    if request.param:
        on_host.install(monkeypatch)


@pytest.mark.parametrize("dtype", CLOSE)
def test_it_is_that_of_the_host(compiled, gpu, dtype):
    """`dtype`: of the weights that are saved; scores have 32 bits or more."""
    import cupy

    draw, wide = np.random.default_rng(0).standard_normal, "f8" if dtype == "float64" else "f4"
    for samples, heads, length in SHAPES:
        shape = (samples, heads, length, length)
        scores, gradient = ((10 * draw(shape)).astype(wide) for _ in range(2))
        expected, slope = scores.astype("f8"), gradient.astype("f8")
        device, on_device = cupy.asarray(scores), cupy.asarray(gradient)
        gpu.counts.clear()
        attention._softmax(device, 0.3)
        weights = device.get().astype(dtype_of(dtype))
        attention._softmax_gradient(on_device, cupy.asarray(weights), 0.3)
        assert gpu.counts["raw kernel"] == (2 if samples else 0)
        for i in range(samples):
            attention._softmax(expected[i], 0.3)
            attention._softmax_gradient(slope[i], weights[i].astype("f8"), 0.3)
        np.testing.assert_allclose(device.get(), expected, rtol=0, atol=CLOSE[dtype])
        np.testing.assert_allclose(on_device.get(), slope, rtol=0, atol=30 * CLOSE[dtype])


def test_not_a_number_stays_none(compiled):
    """In its own row, where a place before it or it itself is none; the later ones do not count."""
    import cupy

    scores = np.zeros((1, 1, 3, 3))
    scores[..., 1, 0] = scores[..., 0, 2] = np.nan
    device = cupy.asarray(scores)
    attention._softmax(device, 1.0)
    result = device.get()[0, 0]
    assert np.isnan(result[1, :2]).all() and result[1, 2] == 0
    assert (result[0] == [1, 0, 0]).all() and np.allclose(result[2], 1 / 3)
