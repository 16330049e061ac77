"""Cache of bound all-reduce calls, keyed by array identity; entries die with the array.

    checked_calls[id(x)] = (dtype, shape, op, world, call)        removed when x is deleted
    unchecked_calls[id(x)] = ...

A look-up takes 0.1 us. Checking the array, choosing an algorithm and passing the address to MPI
take ten times as long, longer than MPI's all-reduce of a few bytes. While an entry exists, `x`
lives: its id is unique, and its memory does not move, since NumPy refuses to resize an array that
is weakly referenced. Its dtype, shape and flags may have changed since: the caller must compare
them. A call works on an alias of `x` that holds no reference to it, so the cache extends no array's
life.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

#: The arguments, and the call. A plain tuple, since a named tuple takes twice as long to unpack.
BoundEntry = tuple[np.dtype, tuple[int, ...], str, Any, Callable[[], Any]]
MAX_REMEMBERED_ARRAYS = 1024

checked_calls: dict[
    int, BoundEntry
] = {}  #: {id of the array: entry}; these calls first compare arguments
unchecked_calls: dict[int, BoundEntry] = {}
_live_arrays: dict[int, weakref.ref[np.ndarray]] = {}
_arrays_passed_once: dict[
    int, weakref.ref[np.ndarray]
] = {}  # arrays that were passed once, and may have been deleted


def was_passed_before(x: np.ndarray) -> bool:
    """Return whether `x` was passed before: caching a call for a temporary array gains nothing."""
    weak_array = _arrays_passed_once.get(id(x))
    if weak_array is not None and weak_array() is x:
        return True
    if len(_arrays_passed_once) >= MAX_REMEMBERED_ARRAYS:
        _arrays_passed_once.clear()
    _arrays_passed_once[id(x)] = weakref.ref(x)
    return False


def store_call(calls: dict[int, BoundEntry], x: np.ndarray, entry: BoundEntry) -> None:
    """Store `entry`, which must not hold `x`, under `id(x)` in `calls` until `x` is deleted."""
    _live_arrays[id(x)] = weakref.ref(x, partial(_drop_entries, id(x)))
    calls[id(x)] = entry


def _drop_entries(key: int, _: object) -> None:
    for entries in (checked_calls, unchecked_calls, _live_arrays):
        entries.pop(key, None)


def make_alias(x: np.ndarray) -> np.ndarray:
    """Return a flat view of contiguous `x` that holds no reference to it."""
    memory = (ctypes.c_char * x.nbytes).from_address(x.ctypes.data)
    return np.ndarray(x.size, x.dtype, memory)  # type: ignore[arg-type]  # any buffer will do
