"""What is done with two numbers: the operations by their names, and how each dtype does them.

16-bit floats have too few digits to add many of them, and NumPy adds them slowly. Each hop adds in
float32, block by block, and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from hpctrain import config
from hpctrain.collectives import bfloat16, fused
from hpctrain.errors import UsageError
from hpctrain.xp import Array, on_device

#: (accumulator, what came, out=accumulator), as NumPy's ufuncs are called.
Operation = Callable[..., Any]

#: The operations by the names that people type.
OPERATIONS: dict[str, np.ufunc] = {"sum": np.add, "min": np.minimum, "max": np.maximum}
#: What may be reduced; bfloat16 is that of ml_dtypes.
DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64")
BLOCK = 32_768  # elements that are held in float32 at once


def operation(name: str, dtype: np.dtype) -> Operation:
    """Return the operation `name` for arrays of `dtype`; raise UsageError if either is unknown."""
    ufunc = OPERATIONS.get(name) or config.pick(OPERATIONS, name, "op")
    if dtype.name not in DTYPES:
        raise UsageError(f"a reduction needs one of {', '.join(DTYPES)}, seen {dtype}")
    return ufunc if dtype.itemsize > 2 else in_float32(ufunc)


def ufunc_of(op: Operation) -> Any:
    """Return what `op` does with two numbers."""
    if op is bfloat16.add:
        return np.add
    return op.ufunc if isinstance(op, InFloat32) else op


def combine(arrays: Sequence[Array], op: Operation, outs: Sequence[Array]) -> None:
    """Do `op` to flat `arrays` of GPUs in one kernel, see `fused.combine`."""
    kind = "bfloat16" if op is bfloat16.add else None
    fused.combine(arrays, ufunc_of(op), outs, kind)


@dataclass(frozen=True)
class InFloat32:
    """A ufunc for 16-bit floats: computed in float32, rounded once per element."""

    ufunc: np.ufunc

    def __call__(self, a: Array, b: Array, out: Array) -> Array:
        """Write what `ufunc` makes of flat `a` and `b` into `out`, which may be one of them."""
        if on_device(out):
            fused.combine([a, b], self.ufunc, [out])
            return out
        for start in range(0, a.size, BLOCK):
            part = slice(start, start + BLOCK)
            out[part] = self.ufunc(a[part].astype(np.float32), b[part].astype(np.float32))
        return out


@lru_cache
def in_float32(ufunc: np.ufunc) -> InFloat32:
    """Return `ufunc` for 16-bit floats."""
    return InFloat32(ufunc)
