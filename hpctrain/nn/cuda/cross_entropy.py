"""Softmax cross-entropy on a GPU: one kernel and a sum, instead of about twenty kernels.

    z (rows, c), labels (rows,)   entropies   told: loss, right, wrong of each row
                                              dz = scale (softmax z - 1 at the label), if requested

A block of threads works on one row after the other, adding in float64. An invalid label is
counted as wrong, and never used as an index.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from hpctrain.core.kernels import BLOCK_SUM, launch_rows, written
from hpctrain.core.xp import Array, namespace

# Of equal values the first counts, as for numpy.argmax.
SOURCE = """
__device__ REAL largest(REAL mine, int at, int* first) {
    __shared__ REAL value[256];
    __shared__ int where[256];
    int i = threadIdx.x;
    value[i] = mine;
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
void entropies(double* told, T* dz, const T* z, const long long* labels, double scale, int wanted,
               long long rows, int c) {
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
        double mine = 0;
        for (int k = threadIdx.x; k < c; k += blockDim.x) mine += exp(wide(own[k]) - most);
        double total = added(mine);
        if (wanted)
            for (int k = threadIdx.x; k < c; k += blockDim.x) {
                REAL share = exp(wide(own[k]) - most) * REAL(scale / total);
                dz[row * c + k] = narrow(k == label ? share - REAL(scale) : share);
            }
        if (threadIdx.x == 0) {
            told[row] = log(total) - (wrong ? 0 : wide(own[label]) - most);
            told[rows + row] = first == label;
            told[2 * rows + row] = wrong;
        }
    }
}
"""


@cache
def source(dtype: str) -> str:
    """Return the CUDA source for `dtype`."""
    return written(BLOCK_SUM + SOURCE, dtype)


def entropies(z: Array, labels: Array, scale: float | None) -> tuple[Array, Array | None]:
    """Return the sums (3,) of loss, right answers and wrong labels, float64; and dz, if a scale.

    `z` is (rows, c), contiguous; `labels` (rows,), of any integers. Asynchronous.
    """
    xp = namespace(z)
    z, numbers = xp.ascontiguousarray(z), xp.empty((3, len(z)), np.float64)
    dz = None if scale is None else xp.empty_like(z)
    scalars = np.float64(scale or 0), np.int32(dz is not None)
    args = (numbers, z if dz is None else dz, z, labels.astype(np.int64), *scalars)
    launch_rows(z, source(z.dtype.name), "entropies", args)
    return numbers.sum(axis=1), dz
