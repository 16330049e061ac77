"""LayerNorm on a GPU: one kernel forward, three backward, instead of about twenty.

    x (rows, c)   normalize_rows   y = (x - mean) scale weight + bias; mean and scale of each row
    dy            back_of_rows     dx = (d - mean d - x_hat mean(d x_hat)) scale, d = dy weight
                  sums_of_rows, totals_of_gradients         [sum dy, sum dy x_hat] of each column

x_hat = (x - mean) scale. Each block of threads works on several rows in turn, and adds in float64.
Saved for backward: x itself, mean and scale.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from hpctrain.core.kernels import BLOCK_SUM, launch_rows, written
from hpctrain.core.xp import Array, namespace
from hpctrain.nn.cuda import batch_norm

SUM_KERNEL = batch_norm.sum_kernel_source(
    "sums_of_rows",
    "double* part, const T* x, const T* dy, const REAL* mean, const REAL* scale, long long rows,",
    batch_norm.LOOP_OVER_ROWS.replace(
        "VALUES",
        "double d = wide(dy[i]); a += d; b += d * ((wide(x[i]) - mean[row]) * scale[row]);",
    ),
    batch_norm.STORE_BLOCK_SUMS,
)
SOURCE = """
extern "C" __global__
void normalize_rows(T* y, REAL* mean, REAL* scale, const T* x, const REAL* weight,
                    const REAL* bias, double epsilon, long long rows, int c) {
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* own = x + row * c;
        double partial = 0;
        for (int k = threadIdx.x; k < c; k += blockDim.x) partial += wide(own[k]);
        REAL m = added(partial) / c;
        partial = 0;
        for (int k = threadIdx.x; k < c; k += blockDim.x) {
            double d = wide(own[k]) - m;
            partial += d * d;
        }
        REAL s = 1 / sqrt(added(partial) / c + epsilon);
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
        double sum_d = 0, sum_d_normal = 0;
        for (int k = threadIdx.x; k < c; k += blockDim.x) {
            REAL d = wide(dy[at + k]) * weight[k];
            sum_d += d;
            sum_d_normal += d * ((wide(x[at + k]) - m) * s);
        }
        REAL level = added(sum_d) / c, along = added(sum_d_normal) / c;
        for (int k = threadIdx.x; k < c; k += blockDim.x) {
            REAL d = wide(dy[at + k]) * weight[k], normal = (wide(x[at + k]) - m) * s;
            dx[at + k] = narrow((d - level - normal * along) * s);
        }
    }
}
"""


class RowNormalization(NamedTuple):
    """The values from which x_hat = (x - mean) / deviation is computed again in backward."""

    x: Array  #: (rows, c), contiguous
    mean: Array  #: (rows,), in the dtype of the weights
    scale: Array  #: (rows,)


@cache
def cuda_source(dtype: str) -> str:
    """Return the CUDA source for `dtype`."""
    return written(BLOCK_SUM + SOURCE + SUM_KERNEL, dtype)


def normalize(
    x: Array, weight: Array, bias: Array, epsilon: float
) -> tuple[Array, RowNormalization]:
    """Return LayerNorm of the rows of `x` (rows, c), and the values saved for backward."""
    xp = namespace(x)
    x = xp.ascontiguousarray(x)
    y, mean, scale = xp.empty_like(x), *(xp.empty(len(x), weight.dtype) for _ in range(2))
    args = (y, mean, scale, x, weight, bias, np.float64(epsilon))
    launch_rows(x, cuda_source(x.dtype.name), "normalize_rows", args)
    return y, RowNormalization(x, mean, scale)


def backward(normalization: RowNormalization, dy: Array, weight: Array) -> Array:
    """Return dL/dx for dL/dy (rows, c)."""
    dx = namespace(dy).empty_like(dy)
    launch_rows(dy, cuda_source(dy.dtype.name), "back_of_rows", (dx, dy, *normalization, weight))
    return dx


def write_parameter_gradients(
    normalization: RowNormalization, dy: Array, bias: Array, weight: Array
) -> None:
    """Write the sums of dy and of dy x_hat, per column, into `bias` and `weight`."""
    total, block_sums = batch_norm.buffers_for(dy)
    if len(block_sums):
        args = (normalization.x, dy, normalization.mean, normalization.scale, np.int64(len(dy)))
        batch_norm.launch_sum_kernel(cuda_source(dy.dtype.name), "sums_of_rows", block_sums, args)
    batch_norm.write_gradient_totals(dy, total, block_sums, bias, weight)
