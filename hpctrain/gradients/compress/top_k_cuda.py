"""The k largest elements of every matrix of a bucket, on a GPU: radix selection without a sort.

A magnitude, read as a whole number, keeps its order. Elements of one magnitude are told apart by
their place, the first being the largest, so that k elements are exactly the k largest keys:

    key      | magnitude, 4 or 8 bytes | place from the end, 4 bytes |
    pass 0   | 3f .. .. ..             | .. .. .. ..                 |
    pass 1   | 3f 80 .. ..             | .. .. .. ..                 |
    ...        and so on, until all that begin alike are taken

How many of the keys that are left have digit 00, 01, ... ff? Which of these has the k-th largest?
A pass is two kernels for all matrices together: one counts the digits behind what is known of the
key, one picks the next. What follows takes the elements, in no order, and leaves zeros. The host
waits for nothing. A magnitude that is not a number is larger than all others.

Cost: with few alike, five times the residual through memory for float32, nine times for float64.
Radix selection; see Alabi, Blanchard, Gordon and Steinbach, "Fast k-selection algorithms for
graphics processing units", 2012.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.core.kernels import THREADS, launch, written
from hpctrain.core.xp import Array, like, namespace

PLACE_BYTES, DIGITS = 4, 256
SOURCE = """
typedef unsigned long long Word;
struct Matrix { long long start, size, k, first; };  // in the plane; its pairs in the block
struct Found { Word value, place, left, done, taken; };  // of the k-th largest key

__device__ Word magnitude(const T* x) {
    return *(const BITS*)x & (((BITS)1 << (8 * sizeof(T) - 1)) - 1);
}
__device__ Word from_the_end(long long i) { return 0xFFFFFFFFull - i; }

// The digit of a key that a pass looks at; -1 of keys that begin otherwise.
__device__ int digit(Word value, Word place, const Found& found, int pass) {
    const int bytes = sizeof(T);
    bool low = pass >= bytes;
    Word here = low ? place : value, known = low ? found.place : found.value;
    int shift = 8 * ((low ? bytes + 4 : bytes) - 1 - pass);
    if (low && value != found.value) return -1;
    if (pass % bytes && (here >> shift >> 8) != (known >> shift >> 8)) return -1;
    return here >> shift & 255;
}

extern "C" __global__
void owe(T* residual, const T* x, const Matrix* matrices, long long bucket) {
    Matrix m = matrices[blockIdx.y];
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < m.size; i += (long long)gridDim.x * blockDim.x)
        residual[m.start + i] += x[m.start + i - bucket];
}

extern "C" __global__
void count_digits(const T* residual, const Matrix* matrices, const Found* founds, unsigned* counts,
                  int pass) {
    __shared__ unsigned bins[256];
    Matrix m = matrices[blockIdx.y];
    Found found = founds[blockIdx.y];
    if (pass && found.done) return;
    for (int b = threadIdx.x; b < 256; b += blockDim.x) bins[b] = 0;
    __syncthreads();
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < m.size; i += (long long)gridDim.x * blockDim.x) {
        int d = digit(magnitude(residual + m.start + i), from_the_end(i), found, pass);
        if (d >= 0) atomicAdd(&bins[d], 1u);
    }
    __syncthreads();
    for (int b = threadIdx.x; b < 256; b += blockDim.x)
        if (bins[b]) atomicAdd(&counts[blockIdx.y * 256 + b], bins[b]);
}

extern "C" __global__
void pick_digit(const Matrix* matrices, Found* founds, unsigned* counts, int pass) {
    __shared__ unsigned bins[256];
    for (int b = threadIdx.x; b < 256; b += blockDim.x) {
        bins[b] = counts[blockIdx.y * 256 + b];
        counts[blockIdx.y * 256 + b] = 0;
    }
    __syncthreads();
    Found* found = founds + blockIdx.y;
    if (threadIdx.x || (pass && found->done)) return;
    if (!pass) *found = {0, 0, (Word)matrices[blockIdx.y].k, 0, 0};
    Word d = 255;
    for (; bins[d] < found->left; d--) found->left -= bins[d];
    const int bytes = sizeof(T);
    if (pass < bytes) found->value |= d << 8 * (bytes - 1 - pass);
    else found->place |= d << 8 * (bytes + 3 - pass);
    found->done = bins[d] == found->left;  // and smaller digits are all zeros: all of these
}

extern "C" __global__
void take_largest(T* residual, const Matrix* matrices, Found* founds, unsigned* where, T* values,
                  long long bucket) {
    Matrix m = matrices[blockIdx.y];
    Found* found = founds + blockIdx.y;
    Word value = found->value, place = found->place;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < m.size; i += (long long)gridDim.x * blockDim.x) {
        T* one = residual + m.start + i;
        Word size = magnitude(one);
        if (size < value || (size == value && from_the_end(i) < place)) continue;
        long long pair = m.first + (long long)atomicAdd(&found->taken, (Word)1);
        where[pair] = m.start + i - bucket;
        values[pair] = *one;
        *one = 0;
    }
}

extern "C" __global__
void add_pairs(T* x, const unsigned* where, const T* values, long long n) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < n; i += (long long)gridDim.x * blockDim.x) x[where[i]] += values[i];
}
"""


def source(dtype: np.dtype) -> str:
    """Return the CUDA source of the kernels for `dtype`, float32 or float64."""
    bits = "unsigned long long" if dtype.itemsize == 8 else "unsigned"
    return written(SOURCE.replace("BITS", bits), dtype.name)


class Largest:
    """Takes the largest elements of the matrices in one bucket; its buffers are kept."""

    def __init__(self, residual: Array, bucket: int, matrices: Sequence[tuple[int, int, int]]):
        """Look at `matrices`, (first element, elements, how many to take) in plane `residual`.

        `bucket` is the element at which the bucket begins.
        """
        xp, firsts = namespace(residual), np.cumsum([0, *(k for _, _, k in matrices)])
        table = [(*m, first) for m, first in zip(matrices, firsts[:-1], strict=True)]
        self._residual, self._bucket = residual, np.int64(bucket)
        self._table = like(residual, np.array(table), np.int64)
        self._state = xp.zeros((len(table), 5), np.uint64)
        self._counts = xp.zeros((len(table), DIGITS), np.uint32)
        self._longest = max(size for _, size, _ in matrices)

    def __call__(self, x: Array, indices: Array, values: Array) -> None:
        """Add bucket `x` to the residual; move the largest of that to `indices` and `values`."""
        residual, table, state, bucket = self._residual, self._table, self._state, self._bucket
        self._put("owe", (residual, x, table, bucket))
        for number in range(x.itemsize + PLACE_BYTES):
            digit = np.int32(number)
            self._put("count_digits", (residual, table, state, self._counts, digit))
            self._put("pick_digit", (table, state, self._counts, digit), THREADS)
        self._put("take_largest", (residual, table, state, indices, values, bucket))

    def _put(self, name: str, args: tuple[object, ...], count: int | None = None) -> None:
        x, rows = self._residual, len(self._table)
        launch(x, source(x.dtype), name, count or self._longest, args, rows)


def add_pairs(x: Array, indices: Array, values: Array) -> None:
    """Add `values` to flat `x` at `indices`, each index at most once."""
    args = (x, indices, values, np.int64(len(indices)))
    launch(x, source(x.dtype), "add_pairs", len(indices), args)
