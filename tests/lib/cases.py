"""Tables shared by several tests: lengths, dtypes, and vectors with known sums."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from threading import Lock
from typing import TypeVar

import ml_dtypes
import numpy as np

#: What tables of lengths, algorithms and ranks go through; test_odd_arrays.py has all there are.
DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64")
OPERATIONS = {"sum": np.add, "min": np.minimum, "max": np.maximum}
LENGTHS = ("0", "1", "P-1", "P", "P+1", "100003")


def length(word: str, size: int) -> int:
    """Return the number of elements that `word` means on `size` ranks."""
    return {"P-1": size - 1, "P": size, "P+1": size + 1}.get(word) if "P" in word else int(word)


#: 16-bit floats, and how many different values may be summed nine times without rounding.
INEXACT = {"float16": 401, "bfloat16": 53}


def dtype_of(name: str) -> np.dtype:
    """Return the dtype that is called `name`, bfloat16 too."""
    return np.dtype(getattr(ml_dtypes, name, name))


Function = TypeVar("Function", bound=Callable)


def kept(function: Function) -> Function:
    """Keep what `function` returns; of ranks that are threads only the first works it out.

    What was asked for longest ago goes first: tables of rows let the number of ranks, on which all
    depends, change last (`on_ranks` next to the function).
    """
    lock, keeps = Lock(), lru_cache(maxsize=500)(function)

    @wraps(function)
    def one_by_one(*args: object) -> object:
        with lock:
            return keeps(*args)

    return one_by_one  # type: ignore[return-value]


@kept
def vector(rank: int, n: int, dtype: str) -> np.ndarray:
    """Integers that differ between ranks and places, small enough to be summed exactly."""
    modulus = INEXACT.get(dtype, 1001)
    return ((np.arange(n) * 7 + rank * 13) % modulus - modulus // 2).astype(dtype_of(dtype))


@kept
def expected(size: int, n: int, dtype: str, op: str) -> np.ndarray:
    """Return what `size` ranks must find, from integers."""
    values = [vector(rank, n, dtype).astype(np.int64) for rank in range(size)]
    return OPERATIONS[op].reduce(values).astype(dtype_of(dtype))
