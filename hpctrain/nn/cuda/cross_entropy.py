"""Softmax cross-entropy on a GPU: one kernel and a sum, instead of about twenty kernels.

    z (rows, c), labels (rows,)   entropies   row_sums: loss, correct, invalid of each row
                                              dz = scale (softmax z - 1 at the label), if requested

Each block of threads works on several rows in turn, and adds in float64. An invalid label is
counted as invalid, and never used as an index.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from hpctrain.core.kernels import BLOCK_SUM, launch_rows, written
from hpctrain.core.xp import Array, namespace

# Of equal maxima the first is the prediction, as in numpy.argmax.
SOURCE = """
__device__ REAL largest(REAL partial, int at, int* first) {
    __shared__ REAL value[256];
    __shared__ int where[256];
    int i = threadIdx.x;
    value[i] = partial;
    where[i] = at;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (i < half) {
            int j = i + half;
            if (value[j] > value[i] || (value[j] == value[i] && where[j] < where[i])) {
                value[i] = value[j];
                where[i] = where[j];
            }
        }
    }
    __syncthreads();
    REAL most = value[0];
    *first = where[0];
    __syncthreads();
    return most;
}

extern "C" __global__
void entropies(double* row_sums, T* dz, const T* z, const long long* labels, double scale,
               int with_gradient, long long rows, int c) {
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* own = z + row * c;
        long long label = labels[row];
        bool wrong = label < 0 || label >= c;
        REAL most = wide(own[0]);
        int at = 0, first;
        for (int k = threadIdx.x; k < c; k += blockDim.x)
            if (wide(own[k]) > most) {
                most = wide(own[k]);
                at = k;
            }
        most = largest(most, at, &first);
        double partial = 0;
        for (int k = threadIdx.x; k < c; k += blockDim.x) partial += exp(wide(own[k]) - most);
        double total = added(partial);
        if (with_gradient)
            for (int k = threadIdx.x; k < c; k += blockDim.x) {
                REAL share = exp(wide(own[k]) - most) * REAL(scale / total);
                dz[row * c + k] = narrow(k == label ? share - REAL(scale) : share);
            }
        if (threadIdx.x == 0) {
            row_sums[row] = log(total) - (wrong ? 0 : wide(own[label]) - most);
            row_sums[rows + row] = first == label;
            row_sums[2 * rows + row] = wrong;
        }
    }
}
"""


@cache
def cuda_source(dtype: str) -> str:
    """Return the CUDA source for `dtype`."""
    return written(BLOCK_SUM + SOURCE, dtype)


def fused_cross_entropy(
    z: Array, labels: Array, scale: float | None, weights: np.ndarray | None = None
) -> tuple[Array, Array | None]:
    """Return (sums, dz) without waiting for the device; dz is None without `scale`.

    The sums are [loss, correct predictions, invalid labels], float64. `z` is (rows, c), contiguous;
    `labels` is (rows,) of any integer dtype. With `weights` (c,) of classes, float64, the loss and
    the gradient of each row have the weight of its label, and a fourth sum is that of the weights.
    """
    xp = namespace(z)
    z, row_sums = xp.ascontiguousarray(z), xp.empty((3, len(z)), np.float64)
    dz = None if scale is None else xp.empty_like(z)
    scalars = np.float64(scale or 0), np.int32(dz is not None)
    args = (row_sums, z if dz is None else dz, z, labels.astype(np.int64), *scalars)
    launch_rows(z, cuda_source(z.dtype.name), "entropies", args)
    if weights is not None:
        own_weights = xp.asarray(weights)[labels.astype(np.int64).clip(0, z.shape[1] - 1)]
        row_sums = xp.concatenate([row_sums, own_weights[None]])
        row_sums[0] *= own_weights
        if dz is not None:
            dz *= own_weights.astype(dz.dtype)[:, None]
    return row_sums.sum(axis=1), dz
