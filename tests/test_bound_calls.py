"""The cache of bound calls: entries live as long as their array, and do not keep it alive."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from hpctrain.user_collectives import bound_calls


def kept(x: np.ndarray) -> None:
    for calls in (bound_calls.checked_calls, bound_calls.unchecked_calls):
        bound_calls.store_call(calls, x, (x.dtype, x.shape, "sum", None, len))


def test_an_entry_goes_with_its_array():
    entries = bound_calls.checked_calls, bound_calls.unchecked_calls, bound_calls._live_arrays
    before, x = list(map(len, entries)), np.zeros(3)
    kept(x)
    kept(x)
    assert all(len(e) == n + 1 and id(x) in e for e, n in zip(entries, before, strict=True))
    del x
    assert list(map(len, entries)) == before


def test_an_array_with_an_entry_keeps_its_place():
    x = np.zeros(3)
    kept(x)
    with pytest.raises(ValueError, match="cannot resize"):
        x.resize(300_000)


@pytest.mark.parametrize("shape", [(0,), (7,), (2, 3), ()])
def test_an_alias_is_the_same_memory_and_does_not_hold_it(shape):
    x = np.zeros(shape, np.float32)
    same, gone = bound_calls.make_alias(x), weakref.ref(x)
    same[:] = 5
    assert (x == 5).all() and same.size == x.size
    del x
    assert gone() is None


def test_only_who_comes_again_has_been_met():
    x = np.zeros(3)
    assert [bound_calls.was_passed_before(x) for _ in range(3)] == [False, True, True]
    assert not any(
        bound_calls.was_passed_before(np.zeros(3)) for _ in range(3)
    )  # at the same address
    rest = [np.zeros(1) for _ in range(bound_calls.MAX_REMEMBERED_ARRAYS)]
    assert not any(map(bound_calls.was_passed_before, rest))
    assert len(bound_calls._arrays_passed_once) <= bound_calls.MAX_REMEMBERED_ARRAYS
