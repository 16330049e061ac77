"""Dropout in one GPU kernel, which draws the same mask as NumPy, bit for bit.

Philox4x64-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011)
turns a counter of four words and a key of two words, by ten rounds of

    (c0, c1, c2, c3)  <-  (high(M1 c2) ^ c1 ^ k0,  low(M1 c2),  high(M0 c0) ^ c3 ^ k1,  low(M0 c0))
    (k0, k1)          <-  (k0 + W0, k1 + W1)       between two rounds

into four words of 64 bits, or eight numbers of 32 bits: the lower half of each word comes first.
NumPy increments the counter, over all four words, *before* it draws: block i of a stream has the
initial counter + i + 1.

A thread draws one block for eight values of one sample. No mask is written to memory: backward
draws it again, at about 50 operations per value.
"""

from __future__ import annotations

from math import prod

import numpy as np

from hpctrain.core.kernels import PACK_BYTES, launch, written
from hpctrain.core.xp import Array, namespace

DRAWS_PER_COUNTER = 8  #: numbers of 32 bits that one counter gives
SOURCE = """
typedef unsigned long long Word;
struct __align__(16) Eight { T at[8]; };

__device__ void philox(Word c[4], Word k0, Word k1) {
    const Word m0 = 0xD2E7470EE14C6C93ull, m1 = 0xCA5A826395121157ull;
    #pragma unroll
    for (int round = 0; round < 10; round++) {
        Word high0 = __umul64hi(m0, c[0]), low0 = m0 * c[0];
        Word high1 = __umul64hi(m1, c[2]), low1 = m1 * c[2];
        c[0] = high1 ^ c[1] ^ k0; c[1] = low1;
        c[2] = high0 ^ c[3] ^ k1; c[3] = low0;
        k0 += 0x9E3779B97F4A7C15ull; k1 += 0xBB67AE8584CAA73Bull;
    }
}

__device__ T drop(T x, Word word, int half, Word limit, REAL factor) {
    Word draw = half ? word >> 32 : word & 0xFFFFFFFFull;
    return narrow(wide(x) * (draw >= limit ? factor : (REAL)0));
}

extern "C" __global__
void dropout(T* y, const T* x, REAL factor, Word limit, long long rows, long long features,
             Word c0, Word c1, Word c2, Word c3, Word k0, Word k1, int packed) {
    long long blocks = (features + 7) / 8;
    long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = first; i < rows * blocks; i += step) {
        Word c[4] = {c0 + (i + 1), c1, c2, c3};
        if (c[0] <= (Word)i && !++c[1] && !++c[2]) ++c[3];
        philox(c, k0, k1);
        long long at = i / blocks * features + i % blocks * 8, end = (i / blocks + 1) * features;
        if (packed) {
            Eight some = *(const Eight*)(x + at);
            #pragma unroll
            for (int k = 0; k < 8; k++)
                some.at[k] = drop(some.at[k], c[k / 2], k % 2, limit, factor);
            *(Eight*)(y + at) = some;
        } else {
            #pragma unroll
            for (int k = 0; k < 8; k++)
                if (at + k < end) y[at + k] = drop(x[at + k], c[k / 2], k % 2, limit, factor);
        }
    }
}
"""


def apply_dropout(x: Array, rate: float, counter: tuple[int, ...], key: tuple[int, int]) -> Array:
    """Return `x` (n, ...) on a GPU with each value set to 0 with probability `rate`.

    The other values are multiplied by 1 / (1 - rate). `counter` holds the four words for the first
    sample; each sample uses one block of the stream for eight values.
    """
    x = namespace(x).ascontiguousarray(x)
    y = namespace(x).empty_like(x)
    if x.size:
        features = prod(x.shape[1:])
        real_type = np.float64 if x.itemsize == 8 else np.float32
        factor = real_type(x.dtype.type(1 / (1 - rate)))  # rounded as on the host
        word_args = [np.uint64(n) for n in (round(rate * 2**32), len(x), features, *counter, *key)]
        is_aligned = all(array.data.ptr % PACK_BYTES == 0 for array in (x, y))
        can_pack = features % DRAWS_PER_COUNTER == 0 and is_aligned
        count = len(x) * -(-features // DRAWS_PER_COUNTER)
        source = written(SOURCE, x.dtype.name)
        launch(x, source, "dropout", count, (y, x, factor, *word_args, np.int32(can_pack)))
    return y
