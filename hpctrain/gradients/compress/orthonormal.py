"""Orthonormal columns by Householder reflections; on a GPU, of many matrices in one kernel.

Column j of a matrix A (n x r), r <= n, is reflected onto axis j (Householder, 1958):

    H_j = 1 - t v v^T      v = (0 .. 0, 1, x_i / (a - b) ..)   below row j
                           a = A_jj    b = -sign(a) |A_j.., j|    t = (b - a) / b

and each reflection is applied to the columns behind it. The result is H_1 .. H_r times the first r
columns of the unit matrix. A column of zeros becomes unit vector j: without a division by zero, and
with a valid direction for PowerSGD.

Each block of threads works on one matrix, and adds in float64, in an order that depends on n alone:
the result has the same bytes on all ranks.
"""

from __future__ import annotations

import numpy as np

from hpctrain.core.kernels import BLOCK_SUM, THREADS, launch, written
from hpctrain.core.xp import Array, namespace, on_device

SOURCE = """
// Column k of a (n x r), from row j on, becomes its reflection; v lies in column j below row j.
__device__ void reflect(T* a, long long n, int r, int j, int k, double t) {
    double partial = 0;
    for (long long i = j + 1 + threadIdx.x; i < n; i += blockDim.x)
        partial += (double)a[i * r + j] * a[i * r + k];
    double times = t * (added(partial) + a[j * r + k]);
    __syncthreads();
    if (threadIdx.x == 0) a[j * r + k] -= times;
    for (long long i = j + 1 + threadIdx.x; i < n; i += blockDim.x)
        a[i * r + k] -= times * a[i * r + j];
    __syncthreads();
}

extern "C" __global__
void orthonormal(T* x, const long long* starts, const long long* rows, double* factors, int r) {
    T* a = x + starts[blockIdx.y];
    long long n = rows[blockIdx.y];
    double* t = factors + blockIdx.y * r;
    for (int j = 0; j < r; j++) {
        double partial = 0;
        for (long long i = j + 1 + threadIdx.x; i < n; i += blockDim.x)
            partial += (double)a[i * r + j] * a[i * r + j];
        double below = added(partial), head = a[j * r + j];
        double length = sqrt(head * head + below), end = head < 0 ? length : -length;
        double factor = below != 0 ? (end - head) / end : 0;
        __syncthreads();
        if (threadIdx.x == 0) t[j] = factor;
        if (factor == 0) continue;  // for all threads
        for (long long i = j + 1 + threadIdx.x; i < n; i += blockDim.x)
            a[i * r + j] /= head - end;
        __syncthreads();
        for (int k = j + 1; k < r; k++) reflect(a, n, r, j, k, factor);
    }
    __syncthreads();
    for (int j = r - 1; j >= 0; j--) {
        double factor = t[j];
        if (threadIdx.x == 0) for (int k = j + 1; k < r; k++) a[j * r + k] = 0;
        __syncthreads();
        for (int k = j + 1; k < r; k++) reflect(a, n, r, j, k, factor);
        for (long long i = j + 1 + threadIdx.x; i < n; i += blockDim.x) a[i * r + j] *= -factor;
        if (threadIdx.x == 0) a[j * r + j] = 1 - factor;
        __syncthreads();
    }
}
"""


def cuda_source(dtype: str) -> str:
    """Return the CUDA source for `dtype`, float32 or float64."""
    return written(BLOCK_SUM + SOURCE, dtype)


class Orthonormalizer:
    """Makes the columns of matrices that lie in one flat array orthonormal, in place."""

    def __init__(self, like: Array, rank: int, rows: list[int]):
        """Prepare for matrices with `rows[i]` >= `rank` rows and `rank` columns.

        `like` is an array in the memory of the matrices.
        """
        self._rank, self._rows = rank, rows
        self._starts = np.cumsum([0, *rows]) * rank
        if on_device(like) and rows:
            xp = namespace(like)
            self._layout = [xp.asarray(np.array(n, np.int64)) for n in (self._starts[:-1], rows)]
            self._factors = xp.zeros((len(rows), rank), np.float64)

    def __call__(self, x: Array) -> None:
        """Overwrite flat `x`; a linearly dependent column becomes an arbitrary direction."""
        if not self._rows:
            return
        if on_device(x):
            args = (x, *self._layout, self._factors, np.int32(self._rank))
            source = cuda_source(x.dtype.name)
            launch(x, source, "orthonormal", THREADS, args, rows=len(self._rows))
            return
        for start, n in zip(self._starts, self._rows, strict=False):
            a = x[start : start + n * self._rank].reshape(n, self._rank)
            a[...] = np.linalg.qr(a)[0]
