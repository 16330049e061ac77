"""The cache of bound calls: entries live as long as their array, and do not keep it alive."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from hpctrain.world.calls.bound_calls import (
    NO_CALL,
    checked_calls,
    make_alias,
    remember_call,
    unchecked_calls,
)


def remember(x: np.ndarray, check: bool = True, op: str = "sum") -> None:
    remember_call(x, op, None, check, lambda alias: alias.sum)


def test_a_call_is_bound_when_its_array_comes_again():
    x = np.ones(3)
    remember(x)
    assert checked_calls[id(x)][:-1] == NO_CALL
    for op in ("sum", "max"):
        remember(x, op=op)
        *arguments, call, _ = checked_calls[id(x)]
        assert arguments == [x.dtype, x.shape, op, None] and call() == 3


def test_an_entry_goes_with_its_array():
    x = np.zeros(3)
    for check in (True, False, True, False, True):
        remember(x, check)
    key = id(x)
    assert key in checked_calls and key in unchecked_calls
    del x
    assert key not in checked_calls and key not in unchecked_calls


def test_an_array_with_an_entry_keeps_its_place():
    x = np.zeros(3)
    remember(x)
    with pytest.raises(ValueError, match="cannot resize"):
        x.resize(300_000)


@pytest.mark.parametrize("shape", [(0,), (7,), (2, 3), ()])
def test_an_alias_is_the_same_memory_and_does_not_hold_it(shape):
    x = np.zeros(shape, np.float32)
    same, gone = make_alias(x), weakref.ref(x)
    same[:] = 5
    assert (x == 5).all() and same.size == x.size
    del x
    assert gone() is None
