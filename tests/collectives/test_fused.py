"""The kernel that combines arrays of neighbours: its source, run by the host's compiler, and calls.

No GPU is needed: C++ with one thread in place of many computes what CUDA's threads do together.
"""

from __future__ import annotations

import numpy as np
import on_host
import pytest
from cases import dtype_of

from hpctrain import kernels
from hpctrain.collectives import OPERATIONS, fused, operation
from hpctrain.collectives.operations import ufunc_of

SHAPES = ((2, 1), (3, 3), (5, 1))  # arrays, outs


def name_of(ufunc: np.ufunc, count: int, outs: int) -> str:
    return f"{ufunc.__name__}_{count}_into_{outs}"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return the kernels of all dtypes, operations and shapes as functions of the host."""
    sources = []
    for dtype in kernels.KINDS:
        for ufunc in OPERATIONS.values():
            for count, outs in SHAPES:
                name = name_of(ufunc, count, outs)
                sources.append((dtype, fused.source(name, count, outs, dtype, ufunc)))
    return on_host.compiled(tmp_path_factory.mktemp("kernels"), sources)


def values(rank: int, n: int, dtype: str) -> np.ndarray:
    """Return numbers of all sizes, not-a-number and infinity among floats."""
    rng, kind = np.random.default_rng(rank), dtype_of(dtype)
    if kind.kind == "i":
        return rng.integers(-(2**30), 2**30, n).astype(kind)
    x = rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)
    x[rank::17], x[rank + 3 :: 19] = np.nan, np.inf
    return x.astype(kind)


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", kernels.KINDS)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_the_source_computes_what_numpy_does(compiled, dtype, op):
    """To the last bit, for lengths that fill no pack, and where arrays lie askew."""
    how = operation(op, dtype_of(dtype))
    for count, outs in SHAPES:
        kernel = compiled[f"{name_of(ufunc_of(how), count, outs)}_{dtype}"]
        for n in (1, 7, 8, 1001):
            for askew in (0, 1):
                arrays = [values(r, n + askew, dtype)[askew:] for r in range(count)]
                told = arrays[0].copy()
                for other in arrays[1:]:
                    how(told, other, out=told)
                ys = [arrays[0], *(np.zeros_like(told) for _ in range(outs - 1))]  # in place
                packs = 0 if askew else told.nbytes // kernels.PACK_BYTES
                kernel(*on_host.arguments(*ys, *arrays, np.int64(n), np.int64(packs)))
                for y in ys:
                    same = y.tobytes() == told.tobytes()
                    assert same or alike(y, told), (count, n, askew)


def alike(x: np.ndarray, y: np.ndarray) -> bool:
    """Return whether all are equal: what is not a number may be so in several ways."""
    return np.array_equal(x.astype(np.float64), y.astype(np.float64), equal_nan=True)


@pytest.mark.parametrize("dtype", kernels.KINDS)
def test_calls_on_a_device(lazy_gpu, dtype):
    import cupy

    hosts = [values(r, 1000, dtype) for r in range(4)]
    arrays = [cupy.asarray(x) for x in hosts]
    how = operation("max", dtype_of(dtype))
    fused.combine(arrays, ufunc_of(how), [arrays[0], arrays[2]])
    fused.combine([x[:0] for x in arrays], ufunc_of(how), [arrays[0][:0]])  # nothing to do
    told = hosts[0].copy()
    for other in hosts[1:]:
        how(told, other, out=told)
    for x, y in zip(arrays, (told, hosts[1], told, hosts[3]), strict=True):
        assert alike(x.get(), y)
    assert lazy_gpu.counts["raw kernel"] == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_take_one_kernel(lazy_gpu, dtype):
    import cupy

    n = 100_000
    a, b = (cupy.asarray(values(r, n, dtype)) for r in (0, 1))
    told = operation("sum", a.dtype)(
        values(0, n, dtype), values(1, n, dtype), out=np.empty(n, a.dtype)
    )
    out = operation("sum", a.dtype)(a, b, out=a)
    assert out is a and lazy_gpu.counts["raw kernel"] == 1
    assert alike(a.get(), told)
