"""Dropout's CUDA kernel: its source, compiled for the host, against NumPy's generator."""

from __future__ import annotations

import numpy as np
import on_host
import pytest
from cases import dtype_of

from hpctrain import nn
from hpctrain.core import xp
from hpctrain.core.kernels import written
from hpctrain.nn.cuda import philox
from hpctrain.nn.dropout import Dropout, keep_mask

DTYPES = ("float32", "float64", "float16", "bfloat16")
FULL = 2**64 - 1
#: counter and key; NumPy's own counts over all four words
NUMBERS = {
    "zeros": ((0, 0, 0, 0), (0, 0)),
    "a step": ((5 * 3, 17, 4, 0), (12345, 1 << 63)),
    "all bits": ((FULL, FULL, FULL, FULL), (FULL, FULL)),
    "carry": ((FULL - 3, 7, 0, 0), (3, 1 << 63)),
    "carry at once": ((FULL, 7, 0, 0), (3, 1 << 63)),
    "carry twice": ((FULL - 1, FULL, 7, 0), (1, 2)),
    "carry on": ((FULL - 1, FULL, FULL, 9), (1, 2)),
}
SHAPES = ((1, 1), (3, 7), (5, 8), (4, 24), (2, 1001), (300, 9))  #: rows, features
RATES = (0.0, 0.1, 0.5, 0.999, 1 - 1e-12)  #: the last rounds to one in 32 bits


@pytest.fixture(scope="module")
def drop(tmp_path_factory):
    """Return what runs the kernel of a dtype by the host's compiler."""
    sources = [(dtype, written(philox.SOURCE, dtype)) for dtype in DTYPES]
    kernels = on_host.compiled(tmp_path_factory.mktemp("kernels"), sources)

    def drop(x, rate, counter, key, packed):
        y, real = np.empty_like(x), np.float64 if x.itemsize == 8 else np.float32
        with np.errstate(over="ignore"):  # of float16
            factor = real(x.dtype.type(1 / (1 - rate)))
        words = [np.uint64(n) for n in (round(rate * 2**32), *x.shape, *counter, *key)]
        kernel = kernels[f"dropout_{x.dtype.name}"]
        kernel(*on_host.arguments(y, x, factor, *words, np.int32(packed)))
        return y

    return drop


def mask(counter, key, rows, features, rate) -> np.ndarray:
    """Return what NumPy's generator keeps, as the numbers of `random_raw` tell."""
    stream = np.random.Philox(counter=np.array(counter, "u8"), key=np.array(key, "u8"))
    draws = stream.random_raw(rows * -(-features // 8) * 4).view(np.uint32).reshape(rows, -1)
    return draws[:, :features].astype(np.uint64) >= round(rate * 2**32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NUMBERS)
def test_the_kernel_draws_what_numpy_draws(drop, name, dtype):
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        x = rng.standard_normal(shape).astype(dtype_of(dtype))
        x.flat[0] = -np.inf  # times zero it is not a number, as everywhere
        for rate in RATES:
            with np.errstate(invalid="ignore", over="ignore"):
                factor = x.dtype.type(1 / (1 - rate))
                expected = x * np.where(mask(*NUMBERS[name], *shape, rate), factor, x.dtype.type(0))
            for packed in {False, shape[1] % 8 == 0}:
                result = drop(x, rate, *NUMBERS[name], packed)
                np.testing.assert_array_equal(result.astype("f8"), expected.astype("f8"))


@pytest.mark.parametrize("first", [0, 7])
def test_it_is_the_mask_of_the_host(drop, first):
    key = nn.Key(11, 3, first, layer=5)
    x, blocks = np.ones((6, 21), "float32"), 3
    result = drop(x, 0.3, (first * blocks, 3, 5, 0), (11, 1 << 63), False)
    assert ((result != 0) == keep_mask(key, 6, 21, 0.3)).all()


@pytest.mark.parametrize("shape", [(7, 3, 5), (2, 16), (0, 4), (3, 0)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_device_drops_what_the_host_drops(lazy_gpu, shape, dtype):
    import cupy

    layer, key = Dropout(0.25), nn.Key(1, 2, 3, layer=4)
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    reported, target = [], []
    for results, item in ((reported, x), (target, cupy.asarray(x))):
        lazy_gpu.counts.clear()
        y, saved = layer.forward({}, item, key)
        results += [y, layer.backward({}, {}, saved, item + item, True)]
    assert lazy_gpu.counts["H2D"] == lazy_gpu.counts["D2H"] == 0
    assert lazy_gpu.counts["raw kernel"] == (2 if x.size else 0)
    for result, expected in zip(target, reported, strict=True):
        assert result.dtype == expected.dtype and xp.to_host(result).tobytes() == expected.tobytes()
