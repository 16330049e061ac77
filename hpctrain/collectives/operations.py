"""What is done with two numbers: the operations by their names, and how each dtype does them.

16-bit floats have too few digits to add many of them, and NumPy adds them slowly. Each hop adds in
float32, block by block, and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpctrain import config
from hpctrain.errors import UsageError

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


def in_float32(ufunc: np.ufunc) -> Operation:
    """Return `ufunc` for 16-bit floats: computed in float32, rounded once per element."""

    def apply(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
        for start in range(0, a.size, BLOCK):
            part = slice(start, start + BLOCK)
            out[part] = ufunc(a[part].astype(np.float32), b[part].astype(np.float32))
        return out

    return apply
