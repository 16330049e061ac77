"""Calls made ready for an array, found by it again for as long as it lives.

    checked[id(x)] = (dtype, shape, op, world, call)        x gone: entry gone
    unchecked[id(x)] = ...

To find its call takes an array 0.1 us. To check it, to choose an algorithm and to tell MPI where it
lies takes ten times that, more than MPI's own all-reduce of a few bytes. While an entry is there,
`x` lives: its id is its own, and its memory stays where it is, since NumPy refuses to resize what
is weakly referenced. Its dtype, shape and flags may have been changed meanwhile: these are to be
compared. A call works on an alias of `x`, which does not hold it, so that nothing lives longer than
without us.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

#: What was asked for, and the call. A plain tuple: one with names takes twice as long to unpack.
Ready = tuple[np.dtype, tuple[int, ...], str, Any, Callable[[], Any]]
MOST_MET = 1024

checked: dict[int, Ready] = {}  #: by the id of the array: calls that compare arguments first
unchecked: dict[int, Ready] = {}
_alive: dict[int, weakref.ref[np.ndarray]] = {}
_met: dict[int, weakref.ref[np.ndarray]] = {}  # arrays that came once, and may be gone


def met_before(x: np.ndarray) -> bool:
    """Return whether `x` came here before: a call for an array that goes at once gains nothing."""
    before = _met.get(id(x))
    if before is not None and before() is x:
        return True
    if len(_met) >= MOST_MET:
        _met.clear()
    _met[id(x)] = weakref.ref(x)
    return False


def keep(calls: dict[int, Ready], x: np.ndarray, ready: Ready) -> None:
    """Find `ready`, which must not hold `x`, under `id(x)` in `calls` until `x` is gone."""
    _alive[id(x)] = weakref.ref(x, partial(_drop, id(x)))
    calls[id(x)] = ready


def _drop(key: int, _: object) -> None:
    for entries in (checked, unchecked, _alive):
        entries.pop(key, None)


def alias(x: np.ndarray) -> np.ndarray:
    """Return contiguous `x`, flat, as an array that does not hold its memory."""
    memory = (ctypes.c_char * x.nbytes).from_address(x.ctypes.data)
    return np.ndarray(x.size, x.dtype, memory)  # type: ignore[arg-type]  # any buffer will do
