"""bfloat16 in arrays of uint16: the upper half of a float32, rounded to nearest, ties to even.

    float32   s eeeeeeee mmmmmmm|mmmmmmmmmmmmmmmm
    bfloat16  s eeeeeeee mmmmmmm|

The range of float32 with 8 digits in place of 24. NumPy has no such dtype, and these few lines
save a dependency. On a GPU each function is one kernel with the same bits.
Source: Kalamkar et al., "A study of bfloat16 for deep learning training", 2019.
"""

from __future__ import annotations

import numpy as np

from hpctrain.collectives.reductions import cuda_sum
from hpctrain.core.kernels import launch, written
from hpctrain.core.xp import Array, on_device

TILE = 65_536  # elements held in float32 at once: they stay in the second-level cache
NAN = 0x7FC0
UPPER = 1 if np.little_endian else 0  # which half of a float32 that is


#: WIDE is float or double.
SOURCE = """
extern "C" __global__ void to_bfloat16(T* y, const WIDE* x, long long n) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < n; i += (long long)gridDim.x * blockDim.x) y[i] = narrow((float)x[i]);
}
extern "C" __global__ void from_bfloat16(WIDE* y, const T* x, long long n) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < n; i += (long long)gridDim.x * blockDim.x) y[i] = wide(x[i]);
}
"""


def source(dtype: np.dtype) -> str:
    """Return the CUDA source of the kernels between bfloat16 and `dtype`."""
    return written(SOURCE.replace("WIDE", "double" if dtype.itemsize == 8 else "float"), "bfloat16")


def round_to_bfloat16(x: Array, out: Array) -> None:
    """Round flat `x`, float32 or float64, to bfloat16 in `out`, uint16."""
    if on_device(x):
        _convert("to_bfloat16", x, out, x.dtype)
        return
    for start in range(0, x.size, TILE):
        part = slice(start, start + TILE)
        _narrow(x[part].astype(np.float32, copy=False), out[part])


def widen(y: Array, out: Array) -> None:
    """Copy flat `y`, bfloat16 in uint16, to `out`, float32 or float64: nothing is lost."""
    if on_device(y):
        _convert("from_bfloat16", y, out, out.dtype)
        return
    for start in range(0, y.size, TILE):
        part = slice(start, start + TILE)
        out[part] = _wide(y[part])


def add(a: Array, b: Array, out: Array) -> Array:
    """Add in float32, round once; all arrays bfloat16 in uint16. Called as NumPy's ufuncs are."""
    if on_device(out):
        cuda_sum.combine([a, b], np.add, [out], "bfloat16")
        return out
    for start in range(0, a.size, TILE):
        part = slice(start, start + TILE)
        wide = _wide(a[part])
        wide += _wide(b[part])
        _narrow(wide, out[part])
    return out


def _convert(name: str, x: Array, out: Array, wide: np.dtype) -> None:
    if x.size:
        launch(x, source(wide), name, x.size, (out, x, np.int64(x.size)))


def _wide(y: np.ndarray) -> np.ndarray:
    bits = y.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _narrow(x: np.ndarray, out: np.ndarray) -> None:
    bits = x.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1  # half of the last place; ties go to the even upper half
    rounded += bits
    rounded += 0x7FFF
    out[...] = rounded.view(np.uint16)[UPPER::2]
    if np.isnan(x.max()):  # rounding carries some NaNs over to zero
        out[np.isnan(x)] = NAN
