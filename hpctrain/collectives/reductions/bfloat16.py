"""bfloat16 in arrays of uint16: the upper half of a float32, rounded to nearest, ties to even.

    float32   s eeeeeeee mmmmmmm|mmmmmmmmmmmmmmmm
    bfloat16  s eeeeeeee mmmmmmm|

It has the range of float32, with 8 binary digits in place of 24. NumPy has no such dtype, and these
few lines save a dependency. On a GPU each function is one kernel with bitwise equal results.
Source: Kalamkar et al., "A study of bfloat16 for deep learning training", 2019.
"""

from __future__ import annotations

import numpy as np

from hpctrain.collectives.reductions import cuda_sum
from hpctrain.core.kernels import launch, written
from hpctrain.core.xp import Array, on_device

TILE_ELEMENTS = 65_536  # elements converted to float32 at once: they stay in the L2 cache
NAN_BITS = 0x7FC0
UPPER_HALF = 1 if np.little_endian else 0  # index of the upper half of a float32 in uint16


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


def kernel_source(dtype: np.dtype) -> str:
    """Return the CUDA source of the kernels between bfloat16 and `dtype`."""
    return written(SOURCE.replace("WIDE", "double" if dtype.itemsize == 8 else "float"), "bfloat16")


def round_to_bfloat16(x: Array, out: Array) -> None:
    """Round flat `x`, float32 or float64, to bfloat16 in `out`, uint16."""
    if on_device(x):
        _launch_conversion("to_bfloat16", x, out, x.dtype)
        return
    for start in range(0, x.size, TILE_ELEMENTS):
        part = slice(start, start + TILE_ELEMENTS)
        _round_to(x[part].astype(np.float32, copy=False), out[part])


def widen_bfloat16(y: Array, out: Array) -> None:
    """Copy flat `y`, bfloat16 in uint16, exactly to `out`, float32 or float64."""
    if on_device(y):
        _launch_conversion("from_bfloat16", y, out, out.dtype)
        return
    for start in range(0, y.size, TILE_ELEMENTS):
        part = slice(start, start + TILE_ELEMENTS)
        out[part] = _to_float32(y[part])


def add(a: Array, b: Array, out: Array) -> Array:
    """Add bfloat16 arrays (uint16) in float32 and round once; called like a NumPy ufunc."""
    if on_device(out):
        cuda_sum.combine([a, b], np.add, [out], "bfloat16")
        return out
    for start in range(0, a.size, TILE_ELEMENTS):
        part = slice(start, start + TILE_ELEMENTS)
        total = _to_float32(a[part])
        total += _to_float32(b[part])
        _round_to(total, out[part])
    return out


def _launch_conversion(name: str, x: Array, out: Array, wide_dtype: np.dtype) -> None:
    if x.size:
        launch(x, kernel_source(wide_dtype), name, x.size, (out, x, np.int64(x.size)))


def _to_float32(y: np.ndarray) -> np.ndarray:
    bits = y.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _round_to(x: np.ndarray, out: np.ndarray) -> None:
    bits = x.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1  # half of the last place; ties go to the even upper half
    rounded += bits
    rounded += 0x7FFF
    out[...] = rounded.view(np.uint16)[UPPER_HALF::2]
    if np.isnan(x.max()):  # rounding turns some NaNs into zeros
        out[np.isnan(x)] = NAN_BITS
