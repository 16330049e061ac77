"""Conversions between bfloat16 and wider floats: rounded to nearest, ties to even.

    float32   s eeeeeeee mmmmmmm|mmmmmmmmmmmmmmmm
    bfloat16  s eeeeeeee mmmmmmm|

It has the range of float32, with 8 binary digits in place of 24; the dtype is that of ml_dtypes. On
a GPU each function is one kernel, with the bits of the host; but float64 numbers that are subnormal
in float32 become zeros, since CuPy compiles with -ftz=true.
Source: Kalamkar et al., "A study of bfloat16 for deep learning training", 2019.
"""

from __future__ import annotations

import numpy as np

from hpctrain.core.kernels import launch, written
from hpctrain.core.xp import Array, on_device

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
    """Round flat `x`, float32 or float64, to bfloat16 in `out`."""
    if on_device(x):
        _launch_conversion("to_bfloat16", x, out, x.dtype)
    else:
        out[...] = x.astype(np.float32, copy=False)


def widen_bfloat16(y: Array, out: Array) -> None:
    """Copy flat `y`, bfloat16, exactly to `out`, float32 or float64."""
    if on_device(y):
        _launch_conversion("from_bfloat16", y, out, out.dtype)
    else:
        out[...] = y


def _launch_conversion(name: str, x: Array, out: Array, wide_dtype: np.dtype) -> None:
    if x.size:
        launch(x, kernel_source(wide_dtype), name, x.size, (out, x, np.int64(x.size)))
