"""Shared parts of our CUDA kernels: representation and arithmetic of dtypes, and launch sizes.

    T      the type in memory; of 16-bit floats unsigned short, their bits
    REAL   the type of arithmetic; `wide(T)` converts to it, `narrow(REAL)` back, with one rounding

A kernel is a string of CUDA in the file that has its equations. It is correct with any number of
threads: so tests compile the same source for the host, where one thread runs the whole kernel.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from hpctrain.core.xp import Array, namespace, raw_kernel

THREADS, BLOCKS_PER_UNIT = 256, 8
MAX_CUDA_BLOCKS, LEAST_THREADS = 4096, 32  #: of a kernel with a block for each row
ELEMENTS_PER_THREAD = 8  #: of a row: more threads would wait for each other more often
PACK_BYTES = 16  #: the longest load of a GPU

_IDENTITY_CONVERSIONS = (
    "__device__ REAL wide(REAL x) { return x; } __device__ REAL narrow(REAL x) { return x; }"
)
_HALF = """
__device__ float wide(unsigned short x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y; }
__device__ unsigned short narrow(float x) { unsigned short y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
"""
_BFLOAT16_CONVERSIONS = """
__device__ float wide(unsigned short x) { return __uint_as_float((unsigned)x << 16); }
__device__ unsigned short narrow(float x) {
    unsigned bits = __float_as_uint(x);
    if (x != x) return (bits >> 16) | 0x40;  // or rounding might carry it over to zero
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
"""
#: Of a product's parts each operation is rounded by itself: the compiler may not fuse them.
_COMPLEX = """
struct Complex { PART real, imag; };
__device__ Complex wide(Complex x) { return x; }
__device__ Complex narrow(Complex x) { return x; }
__device__ Complex operator*(Complex a, Complex b) {
    return {__?sub_rn(__?mul_rn(a.real, b.real), __?mul_rn(a.imag, b.imag)),
            __?add_rn(__?mul_rn(a.real, b.imag), __?mul_rn(a.imag, b.real))};
}
"""
_SINGLE = _COMPLEX.replace("PART", "float").replace("?", "f")
_DOUBLE = _COMPLEX.replace("PART", "double").replace("?", "d")
#: dtype -> its type in memory, the type of its arithmetic, and the conversions
KINDS = {
    "bool": ("unsigned char", "unsigned char", _IDENTITY_CONVERSIONS),
    "uint8": ("unsigned char", "unsigned char", _IDENTITY_CONVERSIONS),
    "int8": ("signed char", "signed char", _IDENTITY_CONVERSIONS),
    "int16": ("short", "short", _IDENTITY_CONVERSIONS),
    "float32": ("float", "float", _IDENTITY_CONVERSIONS),
    "float64": ("double", "double", _IDENTITY_CONVERSIONS),
    "int32": ("int", "int", _IDENTITY_CONVERSIONS),
    "int64": ("long long", "long long", _IDENTITY_CONVERSIONS),
    "float16": ("unsigned short", "float", _HALF),
    "bfloat16": ("unsigned short", "float", _BFLOAT16_CONVERSIONS),
    "complex64": ("struct Complex", "struct Complex", _SINGLE),
    "complex128": ("struct Complex", "struct Complex", _DOUBLE),
}
#: The sum of a value of all threads of a block, which are a power of two; in a fixed order.
BLOCK_SUM = """
__device__ double added(double mine) {
    __shared__ double part[256];
    part[threadIdx.x] = mine;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    __syncthreads();
    double total = part[0];
    __syncthreads();
    return total;
}
"""
HEADER = "typedef MEMORY T;\ntypedef REAL_TYPE REAL;\nCONVERSIONS\n"


@cache
def written(source: str, dtype: str) -> str:
    """Return CUDA `source`, written in T and REAL, for arrays of `dtype`."""
    memory, real, conversions = KINDS[dtype]
    head = HEADER.replace("CONVERSIONS", conversions).replace("MEMORY", memory)
    return head.replace("REAL_TYPE", real) + source


def launch(
    x: Array, source: str, name: str, count: int, args: tuple[Any, ...], rows: int = 1
) -> None:
    """Launch kernel `name` of `source` in the current stream, on the GPU of `x`, asynchronously.

    It has a thread for each of `count` > 0 pieces of work, or as many as run at once, which must
    loop over the pieces; and that for each of `rows`, by `blockIdx.y`. `args`: arrays, and numbers
    of NumPy.
    """
    blocks = min(-(-count // THREADS), _most_blocks(namespace(x), x.data.device_id))
    raw_kernel(x, source, name)((blocks, rows), (THREADS,), args)


def launch_rows(x: Array, source: str, name: str, args: tuple[Any, ...]) -> None:
    """Launch kernel `name` in the current stream, a block of threads for each row of `x` (rows, c).

    Of many rows, a block must loop over several. It gets `args`, then rows (int64) and c (int32).
    """
    rows, c = x.shape
    wanted_threads = (1 << (c - 1).bit_length()) // ELEMENTS_PER_THREAD
    threads = min(THREADS, max(LEAST_THREADS, wanted_threads))
    if rows:
        grid = min(rows, MAX_CUDA_BLOCKS), 1
        raw_kernel(x, source, name)(grid, (threads,), (*args, np.int64(rows), np.int32(c)))


@cache
def _most_blocks(xp: Any, device: int) -> int:
    return BLOCKS_PER_UNIT * xp.cuda.runtime.getDeviceProperties(device)["multiProcessorCount"]
