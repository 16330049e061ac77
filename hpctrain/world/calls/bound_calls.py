"""Cache of bound all-reduce calls, keyed by array identity; entries die with the array.

    checked_calls[id(x)] = (dtype, shape, op, world, call, weak reference to x)
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

from hpctrain.watch import frameless

BoundEntry = tuple[Any, ...]  # plain: a named tuple takes twice as long to unpack
NO_CALL: BoundEntry = (None,) * 5  # equal to the arguments of no call

checked_calls: dict[int, BoundEntry] = {}  #: {id of the array: entry}; ranks compare these calls
unchecked_calls: dict[int, BoundEntry] = {}


def remember_call(
    x: np.ndarray,
    op: str,
    world: Any,
    check: bool,
    bind: Callable[[np.ndarray], Callable[[], Any]],
) -> None:
    """Store the call that `bind` returns for `x`, until `x` is deleted.

    The first time only note that `x` was passed: a call for a temporary array would gain nothing.
    """
    calls, key = checked_calls if check else unchecked_calls, id(x)
    # The reference passes itself to `pop`, as the default for an entry that is gone.
    reference = weakref.ref(x, partial(calls.pop, key))
    if key in calls:
        calls[key] = (x.dtype, x.shape, op, world, frameless(bind(make_alias(x))), reference)
    else:
        calls[key] = (*NO_CALL, reference)


def forget_calls() -> None:
    """Forget all calls: the ranks of a World have changed."""
    checked_calls.clear()
    unchecked_calls.clear()


def make_alias(x: np.ndarray) -> np.ndarray:
    """Return a flat view of contiguous `x` that holds no reference to it."""
    memory = (ctypes.c_char * x.nbytes).from_address(x.ctypes.data)
    return np.ndarray(x.size, x.dtype, memory)  # type: ignore[arg-type]  # any buffer will do
