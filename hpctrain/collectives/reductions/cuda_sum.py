"""One CUDA kernel that combines P arrays and writes the result into Q arrays, in one pass.

    in    [ x0 ..... ]  [ x1 ..... ]  [ x2 ..... ]  [ x3 ..... ]      each read once, 16 bytes at
               \\            |            |            /               a time and thread
                 ((x0 + x1) + x2) + x3                                in registers
               /            |            |            \\
    out   [ y0 ..... ]  [ y1 ..... ]  ...                             each written once

Additions have the order of NumPy in `direct`, and each is one IEEE 754 operation; 16-bit floats are
added in float32, and each sum is rounded. So the CPU gives the same bytes, except for the bits of a
NaN from a sum or a product, and for subnormal numbers of float32, complex64 and bfloat16, which are
zeros here: CuPy compiles each kernel with -ftz=true. An output may be one of the inputs, since a
thread reads an element of all arrays before it writes the result. Arrays of neighbours, even on
another GPU, need no special reads: no cache holds them between kernels.

Cost: (P + Q) n bytes through memory. The source is generated for each P, Q, dtype and operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from hpctrain.core.kernels import KINDS, PACK_BYTES, launch, written
from hpctrain.core.xp import Array

#: NumPy's name of an operation: the CUDA expression of numbers `a` and `b`.
EXPRESSIONS = {
    "add": "a + b",
    "multiply": "a * b",
    "minimum": "a < b ? a : b",
    "maximum": "a > b ? a : b",
    "bitwise_and": "a & b",
    "bitwise_or": "a | b",
    "bitwise_xor": "a ^ b",
    "logical_and": "a && b",
    "logical_or": "a || b",
    "logical_xor": "!a != !b",
}
ARITHMETIC_SOURCE = (
    "__device__ T both(T x, T y) { REAL a = wide(x), b = wide(y); return narrow(HOW); }"
)
#: Floats are ordered by integer keys, see extremum.py.
COMPARISON_SOURCE = """
__device__ T key(T x) {
    const T last = 8 * sizeof(T) - 1, most = (UNSIGNED)-1 >> 1;
    return (T)((UNSIGNED)(x ^ ((x >> last) & most)) + (UNSIGNED)(ROTATION));
}
__device__ T both(T x, T y) { return key(x) COMPARED key(y) ? x : y; }
"""
COMPARISONS = {"minimum": "<", "maximum": ">"}
#: The bits of a NaN's payload, for floats with minimum and maximum.
FRACTION_BITS = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}
SOURCE = """
BOTH
struct __align__(16) Pack { T at[16 / sizeof(T)]; };

extern "C" __global__
void NAME(PARAMETERS, long long n, long long packs) {
    const int each = 16 / sizeof(T);
    long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = first; i < packs; i += step) {
        Pack LOADS;
        #pragma unroll
        for (int k = 0; k < each; k++) { ADDITIONS }
        STORES
    }
    for (long long i = packs * each + first; i < n; i += step) {
        T sum = x0[i];
        SINGLES
        STORE_SINGLES
    }
}
"""


def combine(arrays: Sequence[Array], ufunc: np.ufunc, outs: Sequence[Array]) -> None:
    """Combine flat `arrays`, two or more, by `ufunc` in their order, into all of `outs`.

    All have one length and dtype, and lie on the current GPU or are accessible from it; each of
    `outs` may be one of `arrays`. The kernel is launched on the current stream, without waiting.
    """
    if (
        arrays[0].dtype.kind == "c" and ufunc is np.add
    ):  # real and imaginary parts are summed separately
        real_dtype = np.dtype(f"f{arrays[0].itemsize // 2}")
        arrays, outs = [x.view(real_dtype) for x in arrays], [x.view(real_dtype) for x in outs]
    first, pointers = arrays[0], [x.data.ptr for x in (*arrays, *outs)]
    if not first.size:
        return
    is_aligned = all(pointer % PACK_BYTES == 0 for pointer in pointers)
    pack_count = first.nbytes // PACK_BYTES if is_aligned else 0
    name = f"{ufunc.__name__}_{len(arrays)}_into_{len(outs)}"
    cuda_source = kernel_source(name, len(arrays), len(outs), first.dtype.name, ufunc)
    counts = np.int64(first.size), np.int64(pack_count)
    launch(first, cuda_source, name, pack_count or first.size, (*outs, *arrays, *counts))


@lru_cache(maxsize=256)
def kernel_source(name: str, count: int, outs: int, dtype: str, ufunc: np.ufunc) -> str:
    """Return the CUDA source of the kernel `name` that combines `count` arrays into `outs`."""
    xs, ys = [f"x{i}" for i in range(count)], [f"y{i}" for i in range(outs)]
    replacements = {
        "PARAMETERS": ", ".join([*(f"T* {y}" for y in ys), *(f"const T* {x}" for x in xs)]),
        "LOADS": ", ".join(f"p{x} = ((const Pack*){x})[i]" for x in xs),
        "ADDITIONS": " ".join(f"px0.at[k] = both(px0.at[k], p{x}.at[k]);" for x in xs[1:]),
        "STORE_SINGLES": " ".join(f"{y}[i] = sum;" for y in ys),
        "STORES": " ".join(f"((Pack*){y})[i] = px0;" for y in ys),
        "SINGLES": " ".join(f"sum = both(sum, {x}[i]);" for x in xs[1:]),
        "NAME": name,
    }
    cuda_source = SOURCE
    for placeholder, code in replacements.items():
        cuda_source = cuda_source.replace(placeholder, code)
    if ufunc.__name__ in COMPARISONS and dtype in FRACTION_BITS:
        return written(
            cuda_source.replace("BOTH", _comparison_source(ufunc, dtype)), integer_name(dtype)
        )
    return written(
        cuda_source.replace("BOTH", ARITHMETIC_SOURCE.replace("HOW", EXPRESSIONS[ufunc.__name__])),
        dtype,
    )


def _comparison_source(ufunc: np.ufunc, dtype: str) -> str:
    """Return the CUDA source for the minimum or maximum of two floats."""
    max_nan_payload = (1 << FRACTION_BITS[dtype]) - 1
    rotation = f"{max_nan_payload}LL" if ufunc is np.minimum else f"-{max_nan_payload}LL"
    cuda_source = COMPARISON_SOURCE.replace("ROTATION", rotation).replace(
        "COMPARED", COMPARISONS[ufunc.__name__]
    )
    return cuda_source.replace("UNSIGNED", f"unsigned {KINDS[integer_name(dtype)][0]}")


def integer_name(dtype: str) -> str:
    """Return the name of the signed integer that is as wide as floats of `dtype`."""
    return f"int{dtype.removeprefix('bfloat').removeprefix('float')}"
