"""The reductions by name: the dtypes that support each, and the function of two arrays.

    dtype                          sum       prod          min and max   and  or  xor   mean
    bool                           or        and           and and or    logical        -
    uint8 int8 ... int64           wraps around            yes           bitwise        -
    float16 bfloat16               in float32, rounded once    exact     -              yes
    float32 float64                yes       yes           exact         -              yes
    complex64 complex128           yes       yes           -             -              yes

Integer overflow wraps around, as in NumPy. The sum of bools is their logical or, as in NumPy and
PyTorch. Minimum and maximum of floats are those of IEEE 754-2019: extremum.py. 16-bit
floats have too few digits to add many of them, and NumPy adds them slowly: each hop computes in
float32, tile by tile, and rounds once. The mean is a sum that is divided: mean.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from hpctrain.collectives.reductions import bfloat16, cuda_sum
from hpctrain.collectives.reductions.extremum import Extremum, extremum
from hpctrain.core.errors import UsageError
from hpctrain.core.names import unknown
from hpctrain.core.xp import Array, on_device

#: (accumulator, received, out=accumulator), called like NumPy's ufuncs.
Operation = Callable[..., Any]

_LOGICAL: dict[str, np.ufunc] = {
    "sum": np.logical_or,
    "prod": np.logical_and,
    "min": np.logical_and,
    "max": np.logical_or,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}
_COMPLEX: dict[str, np.ufunc] = {"sum": np.add, "prod": np.multiply}
_FLOAT: dict[str, np.ufunc] = {**_COMPLEX, "min": np.minimum, "max": np.maximum}
_INTEGER: dict[str, np.ufunc] = {
    **_FLOAT,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_BY_DTYPE: dict[str, Mapping[str, np.ufunc]] = {
    "bool": _LOGICAL,
    **dict.fromkeys(("uint8", "int8", "int16", "int32", "int64"), _INTEGER),
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), _FLOAT),
    **dict.fromkeys(("complex64", "complex128"), _COMPLEX),
}
MEAN = "mean"
#: The dtypes that can be reduced; bfloat16 is that of ml_dtypes.
DTYPES = tuple(_BY_DTYPE)
#: The names of operations, beside the mean; not every dtype supports all of them.
OPERATIONS = tuple(_INTEGER)
TILE = 32_768  # elements computed at once: they stay in the cache


def names(dtype: np.dtype) -> tuple[str, ...]:
    """Return the names of the operations on `dtype`; raise UsageError if it has none."""
    if dtype.name not in _BY_DTYPE:
        raise UsageError(f"a reduction needs one of {', '.join(DTYPES)}, seen {dtype}")
    of_dtype = _BY_DTYPE[dtype.name]
    return (*of_dtype, MEAN) if of_dtype in (_FLOAT, _COMPLEX) else tuple(of_dtype)


@lru_cache
def operation(name: str, dtype: np.dtype) -> Operation:
    """Return the operation `name` for arrays of `dtype`; for the mean its sum.

    Raises UsageError with all operations of `dtype` if `name` is none of them.
    """
    defined = names(dtype)
    if name not in defined:
        raise UsageError(_refusal(name, dtype, defined))
    ufunc = _BY_DTYPE[dtype.name]["sum" if name == MEAN else name]
    if name in ("min", "max") and dtype.name in cuda_sum.FRACTION_BITS:
        return extremum(ufunc, dtype)
    if dtype.name in ("float16", "bfloat16"):
        return in_float32(ufunc)
    return complex_product if dtype.kind == "c" and ufunc is np.multiply else ufunc


def _refusal(name: str, dtype: np.dtype, defined: Sequence[str]) -> str:
    expected = f"{dtype.name} has: {', '.join(defined)}"
    if name in (*OPERATIONS, MEAN):
        return f"op '{name}' is not defined for {dtype.name}; {expected}"
    return f"{unknown('op', name, defined).partition('; choose')[0]}; {expected}"


def reduced_by_mpi(x: Array, op: Operation) -> bool:
    """Return whether MPI's own reduction of `x` by `op` has the same result as ours.

    MPI has no 16-bit floats, Open MPI's sums of short integers saturate, and the minimum of zeros
    and NaNs depends on the library.
    """
    if type(x) is not np.ndarray or x.itemsize <= 2:
        return False
    if op is np.add:  # the most common; for few bytes every microsecond counts
        return True
    return type(op) is np.ufunc and (op not in (np.minimum, np.maximum) or x.dtype.kind == "i")


def ufunc_of(op: Operation) -> Any:
    """Return the ufunc that `op` applies to two numbers."""
    if op is bfloat16.add:
        return np.add
    if op is complex_product:
        return np.multiply
    return op.ufunc if isinstance(op, (InFloat32, Extremum)) else op


def combine(arrays: Sequence[Array], op: Operation, outs: Sequence[Array]) -> None:
    """Combine flat `arrays` on GPUs by `op` in one kernel, see `cuda_sum.combine`."""
    kind = "bfloat16" if op is bfloat16.add else None
    cuda_sum.combine(arrays, ufunc_of(op), outs, kind)


@dataclass(frozen=True)
class InFloat32:
    """A ufunc for 16-bit floats: computed in float32, rounded once per element."""

    ufunc: np.ufunc

    def __call__(self, a: Array, b: Array, out: Array) -> Array:
        """Write `ufunc` of flat `a` and `b` into `out`, which may be one of them."""
        if on_device(out):
            cuda_sum.combine([a, b], self.ufunc, [out])
            return out
        for start in range(0, a.size, TILE):
            part = slice(start, start + TILE)
            out[part] = self.ufunc(a[part].astype(np.float32), b[part].astype(np.float32))
        return out


@lru_cache
def in_float32(ufunc: np.ufunc) -> InFloat32:
    """Return `ufunc` for 16-bit floats."""
    return InFloat32(ufunc)


def complex_product(a: Array, b: Array, out: Array) -> Array:
    """Multiply flat complex `a` and `b` into `out`, which may be one of them.

    Each product and each sum is rounded: NumPy's own product is fused or not depending on length.
    """
    if on_device(out):
        cuda_sum.combine([a, b], np.multiply, [out])
        return out
    for start in range(0, a.size, TILE):
        x, y, z = (array[start : start + TILE] for array in (a, b, out))
        real = x.real * y.real - x.imag * y.imag
        z.imag = x.real * y.imag + x.imag * y.real
        z.real = real
    return out
