"""Attention on a device: products by cuBLAS's definition, CUDA sources by the host's compiler."""

from __future__ import annotations

import numpy as np
import on_host
import pytest
from cases import dtype_of

from hpctrain.core import xp
from hpctrain.nn import attention
from hpctrain.nn.cuda import attention as cuda_attention
from hpctrain.nn.cuda.products import multiply

CLOSE = {"float32": 1e-5, "float64": 1e-13, "float16": 4e-3, "bfloat16": 4e-2}
#: samples, length, heads, d: of one place, of more than threads, more rows than blocks, no sample
SHAPES = [(2, 5, 3, 4), (1, 1, 1, 1), (1, 300, 2, 3), (3, 100, 16, 2), (0, 4, 2, 2)]


@pytest.fixture(params=[False, True], ids=["told in Python", "source"])
def compiled(request, gpu, monkeypatch):
    """Run kernels as the stand-in tells them, and their sources by the host's compiler."""
    if request.param:
        on_host.install(monkeypatch)


@pytest.mark.parametrize("dtype", CLOSE)
def test_it_is_that_of_the_host(compiled, gpu, dtype):
    import cupy

    draw = np.random.default_rng(0).standard_normal
    for n, length, heads, d in SHAPES:
        qkv = draw((n, length, 3, heads, d)).astype(dtype_of(dtype))
        dcontext = draw((n, length, heads, d)).astype(dtype_of(dtype))
        # The host computes in 64 bits: what is left is the device's own rounding.
        expected, *saved = attention._attend_by_sample(qkv.astype("f8"))
        slope = attention._qkv_gradient_by_sample(*saved, dcontext.astype("f8"))
        gpu.counts.clear()
        context, *saved = cuda_attention.attend(cupy.asarray(qkv))
        dqkv = cuda_attention.qkv_gradient(*saved, cupy.asarray(dcontext))
        assert gpu.counts["raw kernel"] == (2 if n else 0)
        for result, reference in ((context, expected), (dqkv, slope)):
            assert result.dtype == qkv.dtype and result.flags.c_contiguous
            wide = xp.to_host(result).astype("f8")
            maximum = max(abs(reference).max(), 1) if n else 1
            np.testing.assert_allclose(wide, reference, rtol=0, atol=CLOSE[dtype] * maximum)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_products_of_batches(gpu, dtype, transpose_a, transpose_b):
    import cupy

    draw, kind = np.random.default_rng(0).standard_normal, dtype_of(dtype)
    for batch, m, n, k in (((2, 3), 4, 5, 6), ((1,), 1, 7, 2), ((0,), 2, 2, 2)):
        a, b = draw((*batch, m, k)).astype(kind), draw((*batch, k, n)).astype(kind)
        expected = a.astype("f8") @ b.astype("f8")
        x = np.ascontiguousarray(a.swapaxes(-1, -2)) if transpose_a else a
        y = np.ascontiguousarray(b.swapaxes(-1, -2)) if transpose_b else b
        for result_kind in {kind, np.dtype("float32") if a.itemsize == 2 else kind}:
            out = cupy.empty(expected.shape, result_kind)
            transposed = {"transpose_a": transpose_a, "transpose_b": transpose_b}
            multiply(cupy.asarray(x), cupy.asarray(y), out, **transposed)
            wide = xp.to_host(out).astype("f8")
            np.testing.assert_allclose(wide, expected, rtol=0, atol=5 * CLOSE[dtype])


def test_not_a_number_stays_none(compiled):
    """In its own row, where a place before it or it itself is none; the later ones do not count."""
    import cupy

    scores = np.zeros((1, 1, 3, 3))
    scores[..., 1, 0] = scores[..., 0, 2] = np.nan
    device = cupy.asarray(scores)
    cuda_attention._softmax(device, 1.0)
    result = device.get()[0, 0]
    assert np.isnan(result[1, :2]).all() and result[1, 2] == 0
    assert (result[0] == [1, 0, 0]).all() and np.allclose(result[2], 1 / 3)
