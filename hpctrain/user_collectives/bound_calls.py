"""Cache of bound all-reduce calls, keyed by array identity; entries die with the array.

    checked[id(x)] = (dtype, shape, op, world, call)        x gone: entry gone
    unchecked[id(x)] = ...

A look-up takes 0.1 us. To check the array, to choose an algorithm and to pass its address to MPI
takes ten times that, more than MPI's own all-reduce of a few bytes. While an entry exists, `x`
lives: its id is unique, and its memory does not move, since NumPy refuses to resize an array that
is weakly referenced. Its dtype, shape and flags may have been changed meanwhile: the caller must
compare these. A call works on an alias of `x`, which does not hold it, so that no array lives
longer because of the cache.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

#: The arguments, and the call. A plain tuple: a named one takes twice as long to unpack.
BoundEntry = tuple[np.dtype, tuple[int, ...], str, Any, Callable[[], Any]]
MAX_REMEMBERED_ARRAYS = 1024

checked: dict[int, BoundEntry] = {}  #: by the id of the array: calls that first compare arguments
unchecked: dict[int, BoundEntry] = {}
_live_arrays: dict[int, weakref.ref[np.ndarray]] = {}
_arrays_met_once: dict[
    int, weakref.ref[np.ndarray]
] = {}  # arrays that were passed once, and may be gone


def met_before(x: np.ndarray) -> bool:
    """Return whether `x` was passed before: a cached call for a temporary array gains nothing."""
    weak_array = _arrays_met_once.get(id(x))
    if weak_array is not None and weak_array() is x:
        return True
    if len(_arrays_met_once) >= MAX_REMEMBERED_ARRAYS:
        _arrays_met_once.clear()
    _arrays_met_once[id(x)] = weakref.ref(x)
    return False


def keep(calls: dict[int, BoundEntry], x: np.ndarray, ready: BoundEntry) -> None:
    """Store `ready`, which must not hold `x`, under `id(x)` in `calls` until `x` is gone."""
    _live_arrays[id(x)] = weakref.ref(x, partial(_drop, id(x)))
    calls[id(x)] = ready


def _drop(key: int, _: object) -> None:
    for entries in (checked, unchecked, _live_arrays):
        entries.pop(key, None)


def alias(x: np.ndarray) -> np.ndarray:
    """Return contiguous `x`, flat, as an array that does not hold its memory."""
    memory = (ctypes.c_char * x.nbytes).from_address(x.ctypes.data)
    return np.ndarray(x.size, x.dtype, memory)  # type: ignore[arg-type]  # any buffer will do
