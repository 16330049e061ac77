"""Causal softmax of attention scores on a GPU: one kernel forward, one backward, of ten.

    scores (rows, length)   softmax_rows      a = softmax(factor s) up to the row's place, else 0
    da                      back_of_softmax   ds = factor a (da - sum(a da))

A row has the scores of one place: its index modulo the length. Both kernels work in place, and add
in float64. Scores are float32 or float64; the weights a may have 16 bits in backward.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from hpctrain.core.kernels import BLOCK_SUM, launch_rows, written
from hpctrain.core.xp import Array

SOURCE = """
// The largest value of all threads of a block.
__device__ REAL largest(REAL mine) {
    __shared__ REAL part[256];
    part[threadIdx.x] = mine;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half && part[threadIdx.x + half] > part[threadIdx.x])
            part[threadIdx.x] = part[threadIdx.x + half];
    }
    __syncthreads();
    REAL most = part[0];
    __syncthreads();
    return most;
}

extern "C" __global__
void softmax_rows(REAL* scores, double factor, long long rows, int c) {
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        REAL* own = scores + row * c;
        int seen = row % c + 1;
        REAL by = factor, most = own[0] * by;
        for (int k = threadIdx.x; k < seen; k += blockDim.x)
            if (own[k] * by > most) most = own[k] * by;
        most = largest(most);
        double partial = 0;
        for (int k = threadIdx.x; k < seen; k += blockDim.x) {
            REAL e = exp(own[k] * by - most);
            own[k] = e;
            partial += e;
        }
        REAL total = added(partial);
        for (int k = threadIdx.x; k < c; k += blockDim.x) own[k] = k < seen ? own[k] / total : 0;
    }
}

extern "C" __global__
void back_of_softmax(REAL* gradient, const T* weights, double factor, long long rows, int c) {
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        REAL* own = gradient + row * c;
        const T* a = weights + row * c;
        int seen = row % c + 1;
        double partial = 0;
        for (int k = threadIdx.x; k < seen; k += blockDim.x) partial += wide(a[k]) * own[k];
        REAL level = added(partial), by = factor;
        for (int k = threadIdx.x; k < c; k += blockDim.x)
            own[k] = k < seen ? (own[k] - level) * wide(a[k]) * by : 0;
    }
}
"""


@cache
def cuda_source(dtype: str) -> str:
    """Return the CUDA source for weights of `dtype`."""
    return written(BLOCK_SUM + SOURCE, dtype)


def softmax(scores: Array, factor: float) -> None:
    """Turn the scores (rows, length) into weights, in place."""
    args = (scores, np.float64(factor))
    launch_rows(scores, cuda_source(scores.dtype.name), "softmax_rows", args)


def backward(gradient: Array, weights: Array, factor: float) -> None:
    """Turn dL/da (rows, length) into dL/ds, in place, for the weights a."""
    args = (gradient, weights, np.float64(factor))
    launch_rows(gradient, cuda_source(weights.dtype.name), "back_of_softmax", args)
