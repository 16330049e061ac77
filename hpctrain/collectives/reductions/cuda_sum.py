"""One kernel that combines P arrays of a GPU and writes the result into Q: each byte passes once.

    in    [ x0 ..... ]  [ x1 ..... ]  [ x2 ..... ]  [ x3 ..... ]      each read once, 16 bytes at
               \\            |            |            /               a time and thread
                 ((x0 + x1) + x2) + x3                                in registers
               /            |            |            \\
    out   [ y0 ..... ]  [ y1 ..... ]  ...                             each written once

The order of additions is that of NumPy in `direct`, and each is one operation of IEEE 754, 16-bit
floats being added in float32 and rounded after each: the same bytes as on the CPU, but for the bits
of a NaN from a sum or a product. An output may be one of the inputs, since a thread reads an
element of all arrays before it writes there. Arrays of neighbours, even on another GPU, are read
like the own ones: no cache holds them between kernels.

Cost: (P + Q) n bytes through memory. The source is generated for each P, Q, dtype and operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from hpctrain.core.kernels import KINDS, PACK_BYTES, launch, written
from hpctrain.core.xp import Array

#: The expression of numbers `a` and `b`.
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
COMBINE_FLOATS = (
    "__device__ T both(T x, T y) { REAL a = wide(x), b = wide(y); return narrow(HOW); }"
)
#: Floats are ordered by integer keys, see extremum.py.
KEYED = """
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


def combine(
    arrays: Sequence[Array], ufunc: np.ufunc, outs: Sequence[Array], kind: str | None = None
) -> None:
    """Combine flat `arrays`, two or more, by `ufunc` in their order, into all of `outs`.

    All are of one length and dtype, on the current GPU or accessible from it, and computed as
    numbers of that dtype, or of `kind`; each of `outs` may be one of `arrays`. The kernel is
    launched on the current stream, without waiting.
    """
    if arrays[0].dtype.kind == "c" and ufunc is np.add:  # part by part
        real = np.dtype(f"f{arrays[0].itemsize // 2}")
        arrays, outs = [x.view(real) for x in arrays], [x.view(real) for x in outs]
    first, pointers = arrays[0], [x.data.ptr for x in (*arrays, *outs)]
    if not first.size:
        return
    aligned = all(pointer % PACK_BYTES == 0 for pointer in pointers)
    packs = first.nbytes // PACK_BYTES if aligned else 0
    name = f"{ufunc.__name__}_{len(arrays)}_into_{len(outs)}{'_' if kind else ''}{kind or ''}"
    code = source(name, len(arrays), len(outs), kind or first.dtype.name, ufunc)
    numbers = np.int64(first.size), np.int64(packs)
    launch(first, code, name, packs or first.size, (*outs, *arrays, *numbers))


@lru_cache(maxsize=256)
def source(name: str, count: int, outs: int, dtype: str, ufunc: np.ufunc) -> str:
    """Return the CUDA source of the kernel `name` for `count` arrays into `outs` of them."""
    xs, ys = [f"x{i}" for i in range(count)], [f"y{i}" for i in range(outs)]
    lines = {
        "PARAMETERS": ", ".join([*(f"T* {y}" for y in ys), *(f"const T* {x}" for x in xs)]),
        "LOADS": ", ".join(f"p{x} = ((const Pack*){x})[i]" for x in xs),
        "ADDITIONS": " ".join(f"px0.at[k] = both(px0.at[k], p{x}.at[k]);" for x in xs[1:]),
        "STORE_SINGLES": " ".join(f"{y}[i] = sum;" for y in ys),
        "STORES": " ".join(f"((Pack*){y})[i] = px0;" for y in ys),
        "SINGLES": " ".join(f"sum = both(sum, {x}[i]);" for x in xs[1:]),
        "NAME": name,
    }
    cuda_source = SOURCE
    for word, line in lines.items():
        cuda_source = cuda_source.replace(word, line)
    if ufunc.__name__ in COMPARISONS and dtype in FRACTION_BITS:
        return written(cuda_source.replace("BOTH", _keyed(ufunc, dtype)), integer_of(dtype))
    return written(
        cuda_source.replace("BOTH", COMBINE_FLOATS.replace("HOW", EXPRESSIONS[ufunc.__name__])),
        dtype,
    )


def _keyed(ufunc: np.ufunc, dtype: str) -> str:
    """Return the CUDA source of the lesser or greater of two floats."""
    nans = (1 << FRACTION_BITS[dtype]) - 1
    rotation = f"{nans}LL" if ufunc is np.minimum else f"-{nans}LL"
    cuda_source = KEYED.replace("ROTATION", rotation).replace(
        "COMPARED", COMPARISONS[ufunc.__name__]
    )
    return cuda_source.replace("UNSIGNED", f"unsigned {KINDS[integer_of(dtype)][0]}")


def integer_of(dtype: str) -> str:
    """Return the name of the signed integer that is as wide as floats of `dtype`."""
    return f"int{dtype.removeprefix('bfloat').removeprefix('float')}"
