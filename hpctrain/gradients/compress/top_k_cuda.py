"""The k largest elements of every matrix of a bucket, on a GPU: radix selection without a sort.

The bits of magnitudes, read as integers, have the order of the magnitudes. Equal magnitudes are
ordered by position, the first being the largest, so that exactly k keys are the k largest:

    key      | magnitude, 4 or 8 bytes | position from the end, 4 bytes |
    pass 0   | 3f .. .. ..             | .. .. .. ..                    |
    pass 1   | 3f 80 .. ..             | .. .. .. ..                    |
    ...        until all keys with the known prefix are selected

Each pass determines one digit (8 bits) of the k-th largest key, with two kernels for all matrices
together. `count_digits` counts the next digits of the keys with the known prefix; `pick_digit`
finds the digit of the k-th largest. Then `take_largest` copies the selected elements, in no order,
and leaves zeros. The host never waits. NaN is larger than all other magnitudes.

Cost: if few magnitudes are equal, the residual is read five times for float32, nine for float64.
Radix selection; see Alabi, Blanchard, Gordon and Steinbach, "Fast k-selection algorithms for
graphics processing units", 2012.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.core.kernels import THREADS, launch, written
from hpctrain.core.xp import Array, like, namespace

POSITION_BYTES, DIGIT_VALUES = 4, 256
SOURCE = """
typedef unsigned long long Word;
struct Matrix { long long start, size, k, first; };  // `first`: index of its first pair
struct Selection { Word value, place, left, done, taken; };  // of the k-th largest key

__device__ Word magnitude(const T* x) {
    return *(const BITS*)x & (((BITS)1 << (8 * sizeof(T) - 1)) - 1);
}
__device__ Word from_the_end(long long i) { return 0xFFFFFFFFull - i; }

// The digit of a key that a pass examines; -1 for keys with another prefix.
__device__ int digit(Word value, Word place, const Selection& selection, int pass) {
    const int bytes = sizeof(T);
    bool low = pass >= bytes;
    Word here = low ? place : value, known = low ? selection.place : selection.value;
    int shift = 8 * ((low ? bytes + 4 : bytes) - 1 - pass);
    if (low && value != selection.value) return -1;
    if (pass % bytes && (here >> shift >> 8) != (known >> shift >> 8)) return -1;
    return here >> shift & 255;
}

extern "C" __global__
void add_to_residual(T* residual, const T* x, const Matrix* matrices, long long bucket) {
    Matrix m = matrices[blockIdx.y];
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < m.size; i += (long long)gridDim.x * blockDim.x)
        residual[m.start + i] += x[m.start + i - bucket];
}

extern "C" __global__
void count_digits(const T* residual, const Matrix* matrices, const Selection* selections,
                  unsigned* counts, int pass) {
    __shared__ unsigned bins[256];
    Matrix m = matrices[blockIdx.y];
    Selection selection = selections[blockIdx.y];
    if (pass && selection.done) return;
    for (int b = threadIdx.x; b < 256; b += blockDim.x) bins[b] = 0;
    __syncthreads();
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < m.size; i += (long long)gridDim.x * blockDim.x) {
        int d = digit(magnitude(residual + m.start + i), from_the_end(i), selection, pass);
        if (d >= 0) atomicAdd(&bins[d], 1u);
    }
    __syncthreads();
    for (int b = threadIdx.x; b < 256; b += blockDim.x)
        if (bins[b]) atomicAdd(&counts[blockIdx.y * 256 + b], bins[b]);
}

extern "C" __global__
void pick_digit(const Matrix* matrices, Selection* selections, unsigned* counts, int pass) {
    __shared__ unsigned bins[256];
    for (int b = threadIdx.x; b < 256; b += blockDim.x) {
        bins[b] = counts[blockIdx.y * 256 + b];
        counts[blockIdx.y * 256 + b] = 0;
    }
    __syncthreads();
    Selection* selection = selections + blockIdx.y;
    if (threadIdx.x || (pass && selection->done)) return;
    if (!pass) *selection = {0, 0, (Word)matrices[blockIdx.y].k, 0, 0};
    Word d = 255;
    for (; bins[d] < selection->left; d--) selection->left -= bins[d];
    const int bytes = sizeof(T);
    if (pass < bytes) selection->value |= d << 8 * (bytes - 1 - pass);
    else selection->place |= d << 8 * (bytes + 3 - pass);
    selection->done = bins[d] == selection->left;  // all keys with this prefix are selected
}

extern "C" __global__
void take_largest(T* residual, const Matrix* matrices, Selection* selections, unsigned* indices,
                  T* values, long long bucket) {
    Matrix m = matrices[blockIdx.y];
    Selection* selection = selections + blockIdx.y;
    Word value = selection->value, place = selection->place;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < m.size; i += (long long)gridDim.x * blockDim.x) {
        T* element = residual + m.start + i;
        Word size = magnitude(element);
        if (size < value || (size == value && from_the_end(i) < place)) continue;
        long long pair = m.first + (long long)atomicAdd(&selection->taken, (Word)1);
        indices[pair] = m.start + i - bucket;
        values[pair] = *element;
        *element = 0;
    }
}

extern "C" __global__
void add_pairs(T* x, const unsigned* indices, const T* values, long long n) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < n; i += (long long)gridDim.x * blockDim.x) x[indices[i]] += values[i];
}
"""


def cuda_source(dtype: np.dtype) -> str:
    """Return the CUDA source of the kernels for `dtype`, float32 or float64."""
    bits = "unsigned long long" if dtype.itemsize == 8 else "unsigned"
    return written(SOURCE.replace("BITS", bits), dtype.name)


class LargestSelector:
    """Selects the largest elements of the matrices in one bucket, with buffers for all steps."""

    def __init__(self, residual: Array, bucket: int, matrices: Sequence[tuple[int, int, int]]):
        """Select from `matrices`: (first element, size, elements to select) in plane `residual`.

        `bucket` is the first element of the bucket.
        """
        xp, first_pairs = namespace(residual), np.cumsum([0, *(k for _, _, k in matrices)])
        rows = zip(matrices, first_pairs[:-1], strict=True)
        table = [(*matrix, first_pair) for matrix, first_pair in rows]
        self._residual, self._bucket = residual, np.int64(bucket)
        self._table = like(residual, np.array(table), np.int64)
        self._state = xp.zeros((len(table), 5), np.uint64)
        self._counts = xp.zeros((len(table), DIGIT_VALUES), np.uint32)
        self._max_matrix_size = max(size for _, size, _ in matrices)

    def __call__(self, x: Array, indices: Array, values: Array) -> None:
        """Add bucket `x` to the residual; move its largest elements to `indices` and `values`."""
        residual, table, state, bucket = self._residual, self._table, self._state, self._bucket
        self._launch_kernel("add_to_residual", (residual, x, table, bucket))
        for pass_number in range(x.itemsize + POSITION_BYTES):
            digit = np.int32(pass_number)
            self._launch_kernel("count_digits", (residual, table, state, self._counts, digit))
            self._launch_kernel("pick_digit", (table, state, self._counts, digit), THREADS)
        self._launch_kernel("take_largest", (residual, table, state, indices, values, bucket))

    def _launch_kernel(self, name: str, args: tuple[object, ...], count: int | None = None) -> None:
        x, rows = self._residual, len(self._table)
        launch(x, cuda_source(x.dtype), name, count or self._max_matrix_size, args, rows)


def add_pairs(x: Array, indices: Array, values: Array) -> None:
    """Add `values` to flat `x` at `indices`, each index at most once."""
    args = (x, indices, values, np.int64(len(indices)))
    launch(x, cuda_source(x.dtype), "add_pairs", len(indices), args)
