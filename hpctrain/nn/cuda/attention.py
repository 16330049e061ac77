"""Causal self-attention on a GPU: six products of cuBLAS, two kernels of softmax, four copies.

    qkv (n, length, 3, heads, d)     copied to (3, n, heads, length, d)            q, k, v
    q kT                             softmax_rows      a = softmax(q kT / sqrt(d)), later places 0
    a v                              copied to (n, length, heads, d)               context
    da = dcontext vT                 back_of_softmax   ds = a (da - sum(a da)) / sqrt(d)
    dq = ds k, dk = dsT q, dv = aT dcontext       copied to (n, length, 3, heads, d)

A product takes the matrices of all heads and samples at once, also transposed: for that they lie
side by side. A row of scores belongs to one place, its index modulo the length. The kernels work in
place, and add in float64. With 16 bits, scores and their gradients have float32 within a kernel and
between it and its product.
"""

from __future__ import annotations

from functools import cache
from math import sqrt

import numpy as np

from hpctrain.core.kernels import BLOCK_SUM, launch_rows, written
from hpctrain.core.xp import Array, namespace, narrowed
from hpctrain.nn.cuda.products import multiply

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


def attend(qkv: Array) -> tuple[Array, Array, Array]:
    """Return the context (n, length, heads, d) of `qkv` (n, length, 3, heads, d), and two to save.

    Saved are q, k and v, (3, n, heads, length, d), and the weights (n, heads, length, length).
    """
    xp = namespace(qkv)
    saved_qkv = xp.ascontiguousarray(qkv.transpose(2, 0, 3, 1, 4))
    q, k, v = saved_qkv
    weights = xp.empty((*q.shape[:-1], q.shape[-2]), _score_dtype(qkv))
    multiply(q, k, out=weights, transpose_b=True)
    _softmax(weights, 1 / sqrt(q.shape[-1]))
    weights, context = narrowed(weights, qkv), xp.empty_like(q)
    multiply(weights, v, out=context)
    return xp.ascontiguousarray(context.swapaxes(1, 2)), saved_qkv, weights


def qkv_gradient(qkv: Array, weights: Array, dcontext: Array) -> Array:
    """Return the gradient of `qkv`, (n, length, 3, heads, d), from the context's and two saved."""
    xp, (q, k, v) = namespace(qkv), qkv
    dcontext = xp.ascontiguousarray(dcontext.swapaxes(1, 2))
    dqkv = xp.empty_like(qkv)
    dq, dk, dv = dqkv
    multiply(weights, dcontext, out=dv, transpose_a=True)
    ds = xp.empty(weights.shape, _score_dtype(qkv))
    multiply(dcontext, v, out=ds, transpose_b=True)
    _softmax_gradient(ds, weights, 1 / sqrt(q.shape[-1]))
    ds = narrowed(ds, qkv)
    multiply(ds, k, out=dq)
    multiply(ds, q, out=dk, transpose_a=True)
    return xp.ascontiguousarray(dqkv.transpose(1, 3, 0, 2, 4))


def _score_dtype(x: Array) -> np.dtype:
    """Return the dtype of scores: in 16 bits the sums of softmax would lose small numbers."""
    return np.dtype(np.float32) if x.itemsize == 2 else x.dtype


def _softmax(scores: Array, factor: float) -> None:
    """Turn the scores (..., length, length) into weights, in place."""
    rows = scores.reshape(-1, scores.shape[-1])
    args = (rows, np.float64(factor))
    launch_rows(rows, cuda_source(rows.dtype.name), "softmax_rows", args)


def _softmax_gradient(gradient: Array, weights: Array, factor: float) -> None:
    """Turn dL/da (..., length, length) into dL/ds, in place, for the weights a."""
    rows = gradient.reshape(-1, gradient.shape[-1])
    args = (rows, weights.reshape(rows.shape), np.float64(factor))
    launch_rows(rows, cuda_source(weights.dtype.name), "back_of_softmax", args)
