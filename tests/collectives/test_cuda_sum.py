"""The CUDA kernel that combines arrays: its source, compiled for the host, and its calls.

No GPU is needed: C++ with one thread in place of many computes what CUDA's threads do together.
"""

from __future__ import annotations

import numpy as np
import on_host
import pytest
from cases import dtype_of

from hpctrain.collectives import DTYPES, operation
from hpctrain.collectives.reductions import cuda_sum
from hpctrain.collectives.reductions.operations import MEAN, operation_names, ufunc_of
from hpctrain.core import kernels

SHAPES = ((2, 1), (3, 3), (5, 1))  # arrays, outs
ROWS = [(d, op) for d in DTYPES for op in operation_names(dtype_of(d)) if op != MEAN]


def name_of(ufunc: np.ufunc, count: int, outs: int) -> str:
    return f"{ufunc.__name__}_{count}_into_{outs}"


def computed_in(dtype: str, ufunc: np.ufunc) -> str:
    """Return the dtype of the kernel: complex numbers are added part by part."""
    parts = {"complex64": "float32", "complex128": "float64"}
    return parts.get(dtype, dtype) if ufunc is np.add else dtype


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return the kernels of all dtypes, operations and shapes as functions of the host."""
    sources = {}
    for dtype, op in ROWS:
        ufunc = ufunc_of(operation(op, dtype_of(dtype)))
        kind = computed_in(dtype, ufunc)
        for count, outs in SHAPES:
            name = name_of(ufunc, count, outs)
            sources[kind, name] = kind, cuda_sum.kernel_source(name, count, outs, kind, ufunc)
    return on_host.compiled(tmp_path_factory.mktemp("kernels"), sources.values())


def values(rank: int, n: int, dtype: str) -> np.ndarray:
    """Return numbers of all sizes, not-a-number and infinity among floats."""
    rng, kind = np.random.default_rng(rank), dtype_of(dtype)
    if kind.kind in "biu":
        return rng.integers(-(2**30), 2**30, n).astype(kind)
    if kind.kind == "c":
        return values(rank, 2 * n, f"float{4 * kind.itemsize}").view(kind)
    x = rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)
    x[rank::17], x[rank + 3 :: 19], x[rank::13], x[1::13] = np.nan, np.inf, 0.0, -0.0
    x = x.astype(kind)
    bits = x.view(f"u{kind.itemsize}")
    bits[x != x] += np.uint8(rank)  # NaNs of several bits
    return x


@pytest.mark.parametrize("dtype, op", ROWS)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow)")
def test_the_source_computes_what_numpy_does(compiled, dtype, op):
    """To the last bit, for lengths that fill no pack, and where arrays lie askew."""
    method = operation(op, dtype_of(dtype))
    for count, outs in SHAPES:
        kind = computed_in(dtype, ufunc_of(method))
        kernel = compiled[f"{name_of(ufunc_of(method), count, outs)}_{kind}"]
        for n in (1, 7, 8, 1001):
            for askew in (0, 1):
                arrays = [values(r, n + askew, dtype)[askew:] for r in range(count)]
                reported = arrays[0].copy()
                for other in arrays[1:]:
                    method(reported, other, out=reported)
                ys = [arrays[0], *(np.zeros_like(reported) for _ in range(outs - 1))]  # in place
                packs = 0 if askew else reported.nbytes // kernels.PACK_BYTES
                numbers = np.int64(reported.view(dtype_of(kind)).size), np.int64(packs)
                kernel(*on_host.arguments(*ys, *arrays, *numbers))
                for y in ys:
                    same = y.tobytes() == reported.tobytes()
                    nan_may_differ = op in ("sum", "prod")
                    assert same or (nan_may_differ and alike(y, reported)), (count, n, askew)


def alike(x: np.ndarray, y: np.ndarray) -> bool:
    """Return whether all are equal: what is not a number may be so in several ways."""
    x, y = (
        z.view(f"f{z.itemsize // 2}") if z.dtype.kind == "c" else z.astype(np.float64)
        for z in (x, y)
    )
    return np.array_equal(x, y, equal_nan=True) and np.array_equal(
        np.signbit(x) | np.isnan(x), np.signbit(y) | np.isnan(y)
    )


@pytest.mark.parametrize("dtype, op", ROWS)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow)")
def test_calls_on_a_device(lazy_gpu, dtype, op):
    import cupy

    hosts = [values(r, 1000, dtype) for r in range(4)]
    arrays = [cupy.asarray(x) for x in hosts]
    method = operation(op, dtype_of(dtype))
    cuda_sum.combine(arrays, ufunc_of(method), [arrays[0], arrays[2]])
    cuda_sum.combine([x[:0] for x in arrays], ufunc_of(method), [arrays[0][:0]])  # nothing to do
    reported = hosts[0].copy()
    for other in hosts[1:]:
        method(reported, other, out=reported)
    for x, y in zip(arrays, (reported, hosts[1], reported, hosts[3]), strict=True):
        assert alike(x.get(), y)
    assert lazy_gpu.counts["raw kernel"] == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_take_one_kernel(lazy_gpu, dtype):
    import cupy

    n = 100_000
    a, b = (cupy.asarray(values(r, n, dtype)) for r in (0, 1))
    reported = operation("sum", a.dtype)(
        values(0, n, dtype), values(1, n, dtype), out=np.empty(n, a.dtype)
    )
    out = operation("sum", a.dtype)(a, b, out=a)
    assert out is a and lazy_gpu.counts["raw kernel"] == 1
    assert alike(a.get(), reported)
