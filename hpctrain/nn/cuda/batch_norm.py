"""BatchNorm on a GPU: seven kernels for forward and backward, instead of about fifty.

    x (rows, c)   sums_of_values, totals_of_values        [sum x, sum x^2] of each channel
                  ( added over ranks by way of the host, a few numbers )
                  statistics                              mean, scale; the running ones move
                  normalize                               y = (x - mean) scale weight + bias
    dy            sums_of_gradients, totals_of_gradients  [sum dy, sum dy normal], in g as well
                  ( added over ranks )
                  back                                    dx

Sums are made in float64. Each block of threads adds some rows of x - x_0, x_0 being the first row:
squares of values far from zero would cancel. Blocks depend on the shape alone, and so does the
order of additions. Saved for backward: x itself, the means and the scales.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from hpctrain.core.kernels import THREADS, launch, written
from hpctrain.core.xp import Array, namespace, raw_kernel

MOST_BLOCKS, PER_BLOCK = 512, 4096  #: blocks that add, and the least elements per block
#: One block adds two numbers per channel: threads side by side take channels, then rows in turn.
ADD = """
extern "C" __global__
void NAME(PARAMETERS int c) {
    __shared__ double first[256], second[256];
    int tile = c < blockDim.x ? c : blockDim.x, lanes = blockDim.x / tile;
    for (int from = 0; from < c; from += tile) {
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
ROWS = """for (long long row = (long long)blockIdx.x * lanes + lane; row < rows;
              row += (long long)gridDim.x * lanes) { long long i = row * c + at; VALUES }"""
PARTS = "for (int k = lane; k < parts; k += lanes) { a += part[2 * k * c + at]; " \
        "b += part[(2 * k + 1) * c + at]; }"  # fmt: skip
STORE = "part[2 * blockIdx.x * c + at] = a; part[(2 * blockIdx.x + 1) * c + at] = b;"
ADDITIONS = {
    "sums_of_values": (
        "double* part, const T* x, long long rows,",
        ROWS.replace("VALUES", "double d = (double)wide(x[i]) - wide(x[at]); a += d; b += d * d;"),
        STORE,
    ),
    "sums_of_gradients": (
        "double* part, const T* x, const T* dy, const double* mean, const REAL* scale, "
        "long long rows,",
        ROWS.replace("VALUES", "double d = wide(dy[i]); a += d; b += d * normal(x[i], mean[at], "
                               "scale[at]);"),
        STORE,
    ),
    "totals_of_values": (
        "double* total, const double* part, int parts, const T* x, long long rows,",
        PARTS,
        "double x0 = wide(x[at]); total[at] = rows * x0 + a; "
        "total[c + at] = b + 2 * x0 * a + rows * x0 * x0;",
    ),
    "totals_of_gradients": (
        "double* total, const double* part, int parts, REAL* bias, REAL* weight,",
        PARTS,
        "total[at] = a; total[c + at] = b; bias[at] = a; weight[at] = b;",
    ),
}  # fmt: skip
HEAD = """
typedef INDEX Index;
// (x - mean) scale, the mean in two parts: what the first has lost is in the second
__device__ REAL normal(T x, double mean, REAL scale) {
    REAL most = mean;
    return ((wide(x) - most) - (REAL)(mean - most)) * scale;
}
"""
REST = """
extern "C" __global__
void statistics(double* mean, REAL* scale, REAL* running_mean, REAL* running_variance,
                const double* total, double rows, double momentum, double epsilon, int note,
                int c) {
    double n = rows > 1 ? rows : 1, unbiased = rows / (rows > 2 ? rows - 1 : 1);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < c; i += gridDim.x * blockDim.x) {
        double m = total[i] / n, variance = total[c + i] / n - m * m;
        if (variance < 0) variance = 0;
        mean[i] = m;
        scale[i] = 1 / sqrt(variance + epsilon);
        if (!note) continue;
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
    """The data to compute (x - mean) / deviation of each element again."""

    x: Array  #: (rows, channels), contiguous
    mean: Array  #: (channels,) float64, over all ranks
    scale: Array  #: (channels,) in the dtype of the weights


@cache
def source(dtype: str, far: bool) -> str:
    """Return the CUDA source for `dtype`; `far`: more elements than 2^31."""
    head = HEAD.replace("INDEX", "unsigned long long" if far else "unsigned")
    additions = (addition(name, *words) for name, words in ADDITIONS.items())
    return written("".join([head, *additions, REST]), dtype)


def addition(name: str, parameters: str, loop: str, end: str) -> str:
    """Return the CUDA source of a kernel that adds two numbers, a and b, per channel."""
    text = ADD.replace("NAME", name).replace("PARAMETERS", parameters)
    return text.replace("LOOP", loop).replace("END", end)


def sums_of_values(x: Array) -> Array:
    """Return [sum x, sum x^2] of the channels of `x` (rows, c), float64 (2 c,)."""
    c = x.shape[1]
    total, part = buffers_for(x)
    if len(x):
        add(_source(x), "sums_of_values", part, (x, np.int64(len(x))))
        end = (total, part, np.int32(len(part)), x, np.int64(len(x)), np.int32(c))
        _launch_one_block("totals_of_values", x, end)
    return total


def sums_of_gradients(normal: Normalization, dy: Array, bias: Array, weight: Array) -> Array:
    """Return [sum dy, sum dy normal] of the channels, float64 (2 c,); write both into g as well."""
    x = normal.x
    total, part = buffers_for(x)
    if len(x):
        args = (x, dy, normal.mean, normal.scale, np.int64(len(x)))
        add(_source(x), "sums_of_gradients", part, args)
    totals_of_gradients(x, total, part, bias, weight)
    return total


def totals_of_gradients(x: Array, total: Array, part: Array, bias: Array, weight: Array) -> None:
    """Write the totals of the blocks' sums of gradients into `total`, `bias` and `weight`."""
    end = (total, part, np.int32(len(part)), bias, weight, np.int32(x.shape[1]))
    _launch_one_block("totals_of_gradients", x, end)


def normal_of(
    x: Array, total: Array, rows: float, running: tuple[Array, Array], note: bool,
    momentum: float, epsilon: float,
) -> Normalization:  # fmt: skip
    """Return the normalization of `x` by the sums over `rows` of all ranks.

    With `note` the `running` mean and variance are moved towards those of this batch.
    """
    xp, c = namespace(x), x.shape[1]
    normal = Normalization(x, xp.empty(c, np.float64), xp.empty(c, running[0].dtype))
    numbers = (np.float64(rows), np.float64(momentum), np.float64(epsilon), np.int32(note))
    args = (normal.mean, normal.scale, *running, total, *numbers, np.int32(c))
    launch(x, _source(x), "statistics", c, args)
    return normal


def normalized(normal: Normalization, weight: Array, bias: Array) -> Array:
    """Return (x - mean) scale weight + bias, a new array like x."""
    x = normal.x
    y = namespace(x).empty_like(x)
    if x.size:
        args = (y, x, normal.mean, normal.scale, weight, bias, np.int64(x.size))
        launch(x, _source(x), "normalize", x.size, (*args, np.int32(x.shape[1])))
    return y


def backward(normal: Normalization, dy: Array, weight: Array, total: Array, rows: float) -> Array:
    """Return dL/dx of dL/dy: `total` are the sums of gradients over `rows`, of all ranks."""
    x = normal.x
    dx = namespace(x).empty_like(x)
    if x.size:
        args = (dx, dy, x, normal.mean, normal.scale, weight, total)
        numbers = (np.float64(1 / max(rows, 1)), np.int64(x.size), np.int32(x.shape[1]))
        launch(x, _source(x), "back", x.size, (*args, *numbers))
    return dx


def _source(x: Array) -> str:
    return source(x.dtype.name, x.size >> 31 > 0)


def buffers_for(x: Array) -> tuple[Array, Array]:
    """Return buffers for the totals, zeros if `x` is empty, and for the sums of each block."""
    xp, c = namespace(x), x.shape[1]
    blocks = min(-(-x.size // PER_BLOCK), MOST_BLOCKS)
    total = (xp.empty if x.size else xp.zeros)(2 * c, np.float64)
    return total, xp.empty((blocks, 2, c), np.float64)


def add(code: str, name: str, part: Array, args: tuple[Any, ...]) -> None:
    """Launch a kernel whose blocks each add rows into their row of `part`."""
    kernel = raw_kernel(part, code, name)
    kernel((len(part), 1), (THREADS,), (part, *args, np.int32(part.shape[2])))


def _launch_one_block(name: str, x: Array, args: tuple[Any, ...]) -> None:
    raw_kernel(x, _source(x), name)((1, 1), (THREADS,), args)
