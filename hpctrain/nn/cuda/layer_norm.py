"""LayerNorm on a GPU: one kernel forward, three backward, instead of about twenty.

    x (rows, c)   normalize_rows   y = (x - mean) scale weight + bias; mean and scale of each row
    dy            back_of_rows     dx = (d - mean d - normal (mean d normal)) scale, d = dy weight
                  sums_of_rows, totals_of_gradients        [sum dy, sum dy normal] of each column

A block of threads works on one row after the other, adding in float64. Saved for backward:
x itself and two numbers of each row.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from hpctrain.core.kernels import BLOCK_SUM, launch_rows, written
from hpctrain.core.xp import Array, namespace
from hpctrain.nn.cuda import batch_norm

SUMS = batch_norm.addition(
    "sums_of_rows",
    "double* part, const T* x, const T* dy, const REAL* mean, const REAL* scale, long long rows,",
    batch_norm.ROWS.replace(
        "VALUES",
        "double d = wide(dy[i]); a += d; b += d * ((wide(x[i]) - mean[row]) * scale[row]);",
    ),
    batch_norm.STORE,
)
SOURCE = """
extern "C" __global__
void normalize_rows(T* y, REAL* mean, REAL* scale, const T* x, const REAL* weight,
                    const REAL* bias, double epsilon, long long rows, int c) {
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* own = x + row * c;
        double mine = 0;
        for (int k = threadIdx.x; k < c; k += blockDim.x) mine += wide(own[k]);
        REAL m = added(mine) / c;
        mine = 0;
        for (int k = threadIdx.x; k < c; k += blockDim.x) {
            double d = wide(own[k]) - m;
            mine += d * d;
        }
        REAL s = 1 / sqrt(added(mine) / c + epsilon);
        for (int k = threadIdx.x; k < c; k += blockDim.x)
            y[row * c + k] = narrow((wide(own[k]) - m) * s * weight[k] + bias[k]);
        if (threadIdx.x == 0) {
            mean[row] = m;
            scale[row] = s;
        }
    }
}

extern "C" __global__
void back_of_rows(T* dx, const T* dy, const T* x, const REAL* mean, const REAL* scale,
                  const REAL* weight, long long rows, int c) {
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        long long at = row * c;
        REAL m = mean[row], s = scale[row];
        double one = 0, other = 0;
        for (int k = threadIdx.x; k < c; k += blockDim.x) {
            REAL d = wide(dy[at + k]) * weight[k];
            one += d;
            other += d * ((wide(x[at + k]) - m) * s);
        }
        REAL level = added(one) / c, along = added(other) / c;
        for (int k = threadIdx.x; k < c; k += blockDim.x) {
            REAL d = wide(dy[at + k]) * weight[k], normal = (wide(x[at + k]) - m) * s;
            dx[at + k] = narrow((d - level - normal * along) * s);
        }
    }
}
"""


class RowNormalization(NamedTuple):
    """The data to compute (x - mean) / deviation of each element again."""

    x: Array  #: (rows, c), contiguous
    mean: Array  #: (rows,), in the dtype of the weights
    scale: Array  #: (rows,)


@cache
def source(dtype: str) -> str:
    """Return the CUDA source for `dtype`."""
    return written(BLOCK_SUM + SOURCE + SUMS, dtype)


def normalized(
    x: Array, weight: Array, bias: Array, epsilon: float
) -> tuple[Array, RowNormalization]:
    """Return LayerNorm of the rows of `x` (rows, c), and the values saved for backward."""
    xp = namespace(x)
    x = xp.ascontiguousarray(x)
    y, mean, scale = xp.empty_like(x), *(xp.empty(len(x), weight.dtype) for _ in range(2))
    args = (y, mean, scale, x, weight, bias, np.float64(epsilon))
    launch_rows(x, source(x.dtype.name), "normalize_rows", args)
    return y, RowNormalization(x, mean, scale)


def backward(normal: RowNormalization, dy: Array, weight: Array) -> Array:
    """Return dL/dx of dL/dy (rows, c)."""
    dx = namespace(dy).empty_like(dy)
    launch_rows(dy, source(dy.dtype.name), "back_of_rows", (dx, dy, *normal, weight))
    return dx


def sums(normal: RowNormalization, dy: Array, bias: Array, weight: Array) -> None:
    """Write the sums of dy and of dy times normal, per column, into `bias` and `weight`."""
    total, part = batch_norm.buffers_for(dy)
    if len(part):
        args = (normal.x, dy, normal.mean, normal.scale, np.int64(len(dy)))
        batch_norm.add(source(dy.dtype.name), "sums_of_rows", part, args)
    batch_norm.totals_of_gradients(dy, total, part, bias, weight)
