"""The reductions by name: the dtypes that support each, and the function of two arrays.

    dtype                          sum       prod          min and max   and  or  xor   mean
    bool                           or        and           and and or    logical        -
    uint8 int8 ... int64           wraps around            yes           bitwise        -
    float16 bfloat16               in float32, rounded once    exact     -              yes
    float32 float64                yes       yes           exact         -              yes
    complex64 complex128           yes       yes           -             -              yes

Integer overflow wraps around, as in NumPy. The sum of bools is their logical or, as in NumPy and
PyTorch. Minimum and maximum of floats follow IEEE 754-2019 (extremum.py). 16-bit floats have too
few digits for long sums, and NumPy adds them slowly: each operation computes in float32, tile by
tile, and rounds once. The mean is a divided sum (mean.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from hpctrain.collectives.reductions import cuda_sum
from hpctrain.collectives.reductions.extremum import Extremum, extremum
from hpctrain.core.errors import UsageError
from hpctrain.core.names import unknown
from hpctrain.core.xp import Array, on_device

#: Called like a NumPy ufunc: (accumulator, received, out=accumulator).
Operation = Callable[..., Any]

_LOGICAL_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.logical_or,
    "prod": np.logical_and,
    "min": np.logical_and,
    "max": np.logical_or,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}
_COMPLEX_UFUNCS: dict[str, np.ufunc] = {"sum": np.add, "prod": np.multiply}
_FLOAT_UFUNCS: dict[str, np.ufunc] = {**_COMPLEX_UFUNCS, "min": np.minimum, "max": np.maximum}
_INTEGER_UFUNCS: dict[str, np.ufunc] = {
    **_FLOAT_UFUNCS,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_UFUNCS_BY_DTYPE: dict[str, Mapping[str, np.ufunc]] = {
    "bool": _LOGICAL_UFUNCS,
    **dict.fromkeys(("uint8", "int8", "int16", "int32", "int64"), _INTEGER_UFUNCS),
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), _FLOAT_UFUNCS),
    **dict.fromkeys(("complex64", "complex128"), _COMPLEX_UFUNCS),
}
MEAN = "mean"
#: The dtypes that can be reduced; bfloat16 comes from ml_dtypes.
DTYPES = tuple(_UFUNCS_BY_DTYPE)
#: The names of operations, beside the mean; not every dtype supports every operation.
OPERATIONS = tuple(_INTEGER_UFUNCS)
TILE_ELEMENTS = 32_768  # elements computed at once: they stay in the cache


def operation_names(dtype: np.dtype) -> tuple[str, ...]:
    """Return the names of the operations on `dtype`; raise UsageError if it has none."""
    if dtype.name not in _UFUNCS_BY_DTYPE:
        raise UsageError(f"a reduction needs one of {', '.join(DTYPES)}, seen {dtype}")
    ufuncs = _UFUNCS_BY_DTYPE[dtype.name]
    return (*ufuncs, MEAN) if ufuncs in (_FLOAT_UFUNCS, _COMPLEX_UFUNCS) else tuple(ufuncs)


@lru_cache
def operation(name: str, dtype: np.dtype) -> Operation:
    """Return the operation `name` for arrays of `dtype`; for the mean, the sum.

    Raises UsageError with all operations of `dtype` if it lacks `name`.
    """
    valid_names = operation_names(dtype)
    if name not in valid_names:
        raise UsageError(_describe_fault(name, dtype, valid_names))
    ufunc = _UFUNCS_BY_DTYPE[dtype.name]["sum" if name == MEAN else name]
    if name in ("min", "max") and dtype.name in cuda_sum.FRACTION_BITS:
        return extremum(ufunc, dtype)
    if dtype.name in ("float16", "bfloat16"):
        return float32_ufunc(ufunc)
    return multiply_complex if dtype.kind == "c" and ufunc is np.multiply else ufunc


def _describe_fault(name: str, dtype: np.dtype, valid_names: Sequence[str]) -> str:
    valid_text = f"{dtype.name} has: {', '.join(valid_names)}"
    if name in (*OPERATIONS, MEAN):
        return f"op '{name}' is not defined for {dtype.name}; {valid_text}"
    return f"{unknown('op', name, valid_names).partition('; choose')[0]}; {valid_text}"


def can_mpi_reduce(x: Array, op: Operation) -> bool:
    """Return whether MPI's reduction of `x` by `op` has the same result as ours.

    MPI has no 16-bit floats, Open MPI's sums of short integers saturate, and the minimum of zeros
    and NaNs depends on the library.
    """
    if type(x) is not np.ndarray or x.itemsize <= 2:
        return False
    return type(op) is np.ufunc and (op not in (np.minimum, np.maximum) or x.dtype.kind == "i")


def without_warnings(op: Operation, x: Array) -> Operation:
    """Return `op` for the floats of host array `x`, silent where a sum is infinite or NaN.

    MPI's sums are silent. A context costs 70 ns per call, a `with` statement 700. NumPy 1 keeps
    its settings by thread, where they must stay as they are: it warns.
    """
    if type(x) is not np.ndarray or x.dtype.kind not in "fc":
        return op
    context = copy_context()
    with np.errstate():
        context.run(np.seterr, all="ignore")
    return partial(context.run, op)


def ufunc_of(op: Operation) -> Any:
    """Return the ufunc that `op` applies to two numbers."""
    if op is multiply_complex:
        return np.multiply
    return op.ufunc if isinstance(op, (Float32Ufunc, Extremum)) else op


def combine(arrays: Sequence[Array], op: Operation, outs: Sequence[Array]) -> None:
    """Combine flat `arrays` on GPUs by `op` in one kernel, see `cuda_sum.combine`."""
    cuda_sum.combine(arrays, ufunc_of(op), outs)


@dataclass(frozen=True)
class Float32Ufunc:
    """A ufunc for 16-bit floats: computed in float32, rounded once per element."""

    ufunc: np.ufunc

    def __call__(self, a: Array, b: Array, out: Array) -> Array:
        """Write `ufunc` of flat `a` and `b` into `out`, which may be `a` or `b`."""
        if on_device(out):
            cuda_sum.combine([a, b], self.ufunc, [out])
            return out
        for start in range(0, a.size, TILE_ELEMENTS):
            part = slice(start, start + TILE_ELEMENTS)
            out[part] = self.ufunc(a[part].astype(np.float32), b[part].astype(np.float32))
        return out


@lru_cache
def float32_ufunc(ufunc: np.ufunc) -> Float32Ufunc:
    """Return `ufunc` for 16-bit floats."""
    return Float32Ufunc(ufunc)


def multiply_complex(a: Array, b: Array, out: Array) -> Array:
    """Multiply flat complex `a` and `b` into `out`, which may be `a` or `b`.

    Each product and each sum is rounded; NumPy's product may be fused, depending on the length.
    """
    if on_device(out):
        cuda_sum.combine([a, b], np.multiply, [out])
        return out
    for start in range(0, a.size, TILE_ELEMENTS):
        x, y, z = (array[start : start + TILE_ELEMENTS] for array in (a, b, out))
        real = x.real * y.real - x.imag * y.imag
        z.imag = x.real * y.imag + x.imag * y.real
        z.real = real
    return out
