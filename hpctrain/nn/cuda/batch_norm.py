"""BatchNorm on a GPU: seven kernels for forward and backward, instead of about fifty.

    x (rows, c)   sums_of_values, totals_of_values        [sum x, sum x^2] of each channel
                  ( a few numbers, summed over ranks through the host )
                  statistics                              mean, scale; updates running statistics
                  normalize                               y = (x - mean) scale weight + bias
    dy            sums_of_gradients, totals_of_gradients  [sum dy, sum dy x_hat], also written to g
                  ( summed over ranks )
                  back                                    dx

x_hat = (x - mean) scale. Sums are computed in float64. Each block of threads adds some rows of
x - x_0, where x_0 is the first row: sums of x^2 would lose digits where the mean is far from zero.
The assignment of rows to blocks, and with it the order of additions, depends on the shape alone.
Saved for backward: x itself, the means and the scales.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from hpctrain.core.kernels import THREADS, launch, written
from hpctrain.core.xp import Array, namespace, raw_kernel

MAX_BLOCKS, MIN_ELEMENTS_PER_BLOCK = 512, 4096  #: blocks of threads that add rows
TOTAL_CHANNELS = 16  #: that a block of threads adds over all block sums
#: One block adds two numbers per channel; adjacent threads work on adjacent channels.
SUM_KERNEL = """
extern "C" __global__
void NAME(PARAMETERS int c) {
    __shared__ double first[256], second[256];
    int most = CHANNELS < blockDim.x ? CHANNELS : blockDim.x;
    int tile = c < most ? c : most, lanes = blockDim.x / tile;
    for (int from = FIRST * tile; from < c; from += STEP * tile) {
        int lane = threadIdx.x / tile, at = from + threadIdx.x % tile;
        double a = 0, b = 0;
        if (lane < lanes && at < c) { LOOP }
        first[threadIdx.x] = a;
        second[threadIdx.x] = b;
        __syncthreads();
        if (lane == 0 && at < c) {
            for (int k = 1; k < lanes; k++) {
                a += first[k * tile + threadIdx.x];
                b += second[k * tile + threadIdx.x];
            }
            END
        }
        __syncthreads();
    }
}
"""
LOOP_OVER_ROWS = """for (long long row = (long long)blockIdx.x * lanes + lane; row < rows;
              row += (long long)gridDim.x * lanes) { long long i = row * c + at; VALUES }"""
LOOP_OVER_BLOCK_SUMS = "for (int k = lane; k < parts; k += lanes) { a += part[2 * k * c + at]; " \
        "b += part[(2 * k + 1) * c + at]; }"  # fmt: skip
STORE_BLOCK_SUMS = "part[2 * blockIdx.x * c + at] = a; part[(2 * blockIdx.x + 1) * c + at] = b;"
SUM_KERNEL_PARTS = {
    "sums_of_values": (
        "double* part, const T* x, long long rows,",
        LOOP_OVER_ROWS.replace("VALUES", "double d = (double)wide(x[i]) - wide(x[at]); a += d; "
                                         "b += d * d;"),
        STORE_BLOCK_SUMS,
    ),
    "sums_of_gradients": (
        "double* part, const T* x, const T* dy, const double* mean, const REAL* scale, "
        "long long rows,",
        LOOP_OVER_ROWS.replace("VALUES", "double d = wide(dy[i]); a += d; "
                                         "b += d * normal(x[i], mean[at], scale[at]);"),
        STORE_BLOCK_SUMS,
    ),
    "totals_of_values": (
        "double* total, const double* part, int parts, const T* x, long long rows,",
        LOOP_OVER_BLOCK_SUMS,
        "double x0 = wide(x[at]); total[at] = rows * x0 + a; "
        "total[c + at] = b + 2 * x0 * a + rows * x0 * x0;",
    ),
    "totals_of_gradients": (
        "double* total, const double* part, int parts, REAL* bias, REAL* weight,",
        LOOP_OVER_BLOCK_SUMS,
        "total[at] = a; total[c + at] = b; bias[at] = a; weight[at] = b;",
    ),
}  # fmt: skip
SOURCE_HEAD = """
typedef INDEX Index;
// (x - mean) scale; the rounding error of the mean in REAL is subtracted in a second step
__device__ REAL normal(T x, double mean, REAL scale) {
    REAL rounded = mean;
    return ((wide(x) - rounded) - (REAL)(mean - rounded)) * scale;
}
"""
OTHER_KERNELS = """
extern "C" __global__
void statistics(double* mean, REAL* scale, REAL* running_mean, REAL* running_variance,
                const double* total, double rows, double momentum, double epsilon,
                int update_running, int c) {
    double n = rows > 1 ? rows : 1, unbiased = rows / (rows > 2 ? rows - 1 : 1);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < c; i += gridDim.x * blockDim.x) {
        double m = total[i] / n, variance = total[c + i] / n - m * m;
        if (variance < 0) variance = 0;
        mean[i] = m;
        scale[i] = 1 / sqrt(variance + epsilon);
        if (!update_running) continue;
        running_mean[i] = running_mean[i] * (REAL)(1 - momentum) + (REAL)(momentum * m);
        running_variance[i] = running_variance[i] * (REAL)(1 - momentum)
            + (REAL)(momentum * (variance * unbiased));
    }
}

extern "C" __global__
void normalize(T* y, const T* x, const double* mean, const REAL* scale, const REAL* weight,
               const REAL* bias, long long count, int c) {
    Index first = (Index)blockIdx.x * blockDim.x + threadIdx.x;
    for (Index i = first; i < count; i += (Index)gridDim.x * blockDim.x) {
        int at = i % c;
        y[i] = narrow(normal(x[i], mean[at], scale[at]) * weight[at] + bias[at]);
    }
}

extern "C" __global__
void back(T* dx, const T* dy, const T* x, const double* mean, const REAL* scale,
          const REAL* weight, const double* total, double share, long long count, int c) {
    Index first = (Index)blockIdx.x * blockDim.x + threadIdx.x;
    for (Index i = first; i < count; i += (Index)gridDim.x * blockDim.x) {
        int at = i % c;
        REAL by_mean = total[at] * share, by_variance = total[c + at] * share;
        REAL d = wide(dy[i]) - normal(x[i], mean[at], scale[at]) * by_variance - by_mean;
        dx[i] = narrow(d * (scale[at] * weight[at]));
    }
}
"""


class Normalization(NamedTuple):
    """The values from which x_hat = (x - mean) / deviation is computed again in backward."""

    x: Array  #: (rows, channels), contiguous
    mean: Array  #: (channels,) float64, over all ranks
    scale: Array  #: (channels,) in the dtype of the weights


@cache
def cuda_source(dtype: str, use_64_bits: bool) -> str:
    """Return the CUDA source for `dtype`; arrays above 2^31 elements need indices of 64 bits."""
    head = SOURCE_HEAD.replace("INDEX", "unsigned long long" if use_64_bits else "unsigned")
    sum_kernels = (sum_kernel_source(name, *parts) for name, parts in SUM_KERNEL_PARTS.items())
    return written("".join([head, *sum_kernels, OTHER_KERNELS]), dtype)


def sum_kernel_source(name: str, parameters: str, loop: str, epilogue: str) -> str:
    """Return the CUDA source of a kernel that adds two numbers, a and b, per channel."""
    adds_blocks = loop is LOOP_OVER_BLOCK_SUMS  # then blocks of threads share the channels
    code = SUM_KERNEL.replace("NAME", name).replace("PARAMETERS", parameters)
    code = code.replace("CHANNELS", str(TOTAL_CHANNELS if adds_blocks else THREADS))
    code = code.replace("FIRST", "blockIdx.x" if adds_blocks else "0")
    code = code.replace("STEP", "gridDim.x" if adds_blocks else "1")
    return code.replace("LOOP", loop).replace("END", epilogue)


def sum_values(x: Array) -> Array:
    """Return [sum x, sum x^2] of the channels of `x` (rows, c), float64 (2 c,)."""
    c = x.shape[1]
    total, block_sums = buffers_for(x)
    if len(x):
        launch_sum_kernel(_source_for(x), "sums_of_values", block_sums, (x, np.int64(len(x))))
        args = (total, block_sums, np.int32(len(block_sums)), x, np.int64(len(x)), np.int32(c))
        _launch_total_kernel("totals_of_values", x, args)
    return total


def sum_gradients(normalization: Normalization, dy: Array, bias: Array, weight: Array) -> Array:
    """Return [sum dy, sum dy x_hat] of channels, float64 (2 c,); also write `bias` and `weight`."""
    x = normalization.x
    total, block_sums = buffers_for(x)
    if len(x):
        args = (x, dy, normalization.mean, normalization.scale, np.int64(len(x)))
        launch_sum_kernel(_source_for(x), "sums_of_gradients", block_sums, args)
    write_gradient_totals(x, total, block_sums, bias, weight)
    return total


def write_gradient_totals(
    x: Array, total: Array, block_sums: Array, bias: Array, weight: Array
) -> None:
    """Add `block_sums` over all blocks; write the totals into `total`, `bias` and `weight`."""
    args = (total, block_sums, np.int32(len(block_sums)), bias, weight, np.int32(x.shape[1]))
    _launch_total_kernel("totals_of_gradients", x, args)


def normalization_from(
    x: Array, total: Array, rows: float, running: tuple[Array, Array], update_running: bool,
    momentum: float, epsilon: float,
) -> Normalization:  # fmt: skip
    """Return the normalization of `x` by the global sums `total` over `rows` rows.

    With `update_running`, the statistics of this batch are averaged into `running`, which is
    (running mean, running variance).
    """
    xp, c = namespace(x), x.shape[1]
    mean, scale = xp.empty(c, np.float64), xp.empty(c, running[0].dtype)
    scalars = (np.float64(rows), np.float64(momentum), np.float64(epsilon))
    args = (mean, scale, *running, total, *scalars, np.int32(update_running), np.int32(c))
    launch(x, _source_for(x), "statistics", c, args)
    return Normalization(x, mean, scale)


def normalize(normalization: Normalization, weight: Array, bias: Array) -> Array:
    """Return (x - mean) scale weight + bias as a new array."""
    x = normalization.x
    y = namespace(x).empty_like(x)
    if x.size:
        args = (y, x, normalization.mean, normalization.scale, weight, bias, np.int64(x.size))
        launch(x, _source_for(x), "normalize", x.size, (*args, np.int32(x.shape[1])))
    return y


def backward(
    normalization: Normalization, dy: Array, weight: Array, total: Array, rows: float
) -> Array:
    """Return dL/dx for dL/dy; `total` holds the global sums of gradients over `rows` rows."""
    x = normalization.x
    dx = namespace(x).empty_like(x)
    if x.size:
        args = (dx, dy, x, normalization.mean, normalization.scale, weight, total)
        scalars = (np.float64(1 / max(rows, 1)), np.int64(x.size), np.int32(x.shape[1]))
        launch(x, _source_for(x), "back", x.size, (*args, *scalars))
    return dx


def _source_for(x: Array) -> str:
    return cuda_source(x.dtype.name, x.size >> 31 > 0)


def buffers_for(x: Array) -> tuple[Array, Array]:
    """Return a buffer for the totals, zeros if `x` is empty, and one for the sums of each block."""
    xp, c = namespace(x), x.shape[1]
    blocks = min(-(-x.size // MIN_ELEMENTS_PER_BLOCK), MAX_BLOCKS)
    total = (xp.empty if x.size else xp.zeros)(2 * c, np.float64)
    return total, xp.empty((blocks, 2, c), np.float64)


def launch_sum_kernel(code: str, name: str, block_sums: Array, args: tuple[Any, ...]) -> None:
    """Launch a kernel in which each block adds rows and writes one row of `block_sums`."""
    kernel = raw_kernel(block_sums, code, name)
    kernel((len(block_sums), 1), (THREADS,), (block_sums, *args, np.int32(block_sums.shape[2])))


def _launch_total_kernel(name: str, x: Array, args: tuple[Any, ...]) -> None:
    blocks = -(-x.shape[1] // TOTAL_CHANNELS)
    raw_kernel(x, _source_for(x), name)((blocks, 1), (THREADS,), args)
