"""Floats of 16 bits with a GPU's rounding: products are added in float32 and rounded once.

NumPy multiplies matrices of 16-bit floats slowly and rounds after each addition. It also promotes
a bfloat16 and a number to float32; on a GPU the result has the dtype of its operands.
"""

from __future__ import annotations

import operator

import numpy as np

REPEATED = (np.matmul, operator.matmul)  #: of several matrices at once, too
PRODUCTS = (*REPEATED, np.dot)


def plain(function):
    """Return `function` with its own idea of dtypes."""
    function.plain = True
    return function


def as_on_a_gpu(function):
    """Return `function` of NumPy's arrays, with a GPU's results where some have 16 bits."""
    if getattr(function, "plain", False):
        return function

    def call(*args, out=None, **kwargs):
        kind = _sixteen(args)
        if kind is None:
            return function(*args, **kwargs, **({} if out is None else {"out": out}))
        if function in REPEATED and kind != np.float16 and max(map(np.ndim, args)) > 2:
            raise TypeError("data type 'E' not understood")  # as CuPy 14 says of bfloat16
        if function in PRODUCTS:
            args = [a.astype(np.float32) if isinstance(a, np.ndarray) else a for a in args]
        result = function(*args, **kwargs)
        if out is not None:
            out[...] = result
            return out
        if "dtype" in kwargs or not _is_wide(result):
            return result
        return np.asarray(result).astype(kind)

    return call


def _sixteen(args) -> np.dtype | None:
    """Return the 16-bit dtype of all floating arrays among `args`, None if they have another."""
    kinds = {a.dtype for a in args if isinstance(a, np.ndarray) and a.dtype.kind not in "biu"}
    (kind,) = kinds if len(kinds) == 1 else (None,)
    return kind if kind is not None and kind.itemsize == 2 else None


def _is_wide(result) -> bool:
    """Return whether a result is of more bits; what is not may be a view, and must stay one."""
    floating = isinstance(result, (np.ndarray, np.generic)) and result.dtype.kind == "f"
    return floating and result.dtype.itemsize > 2
