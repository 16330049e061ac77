"""Calls made ready for an array: found while it lives, never holding it."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from hpctrain import ready


def kept(x: np.ndarray) -> None:
    for calls in (ready.checked, ready.unchecked):
        ready.keep(calls, x, (x.dtype, x.shape, "sum", None, len))


def test_an_entry_goes_with_its_array():
    entries = ready.checked, ready.unchecked, ready._alive
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
    same, gone = ready.alias(x), weakref.ref(x)
    same[:] = 5
    assert (x == 5).all() and same.size == x.size
    del x
    assert gone() is None


def test_only_who_comes_again_has_been_met():
    x = np.zeros(3)
    assert [ready.met_before(x) for _ in range(3)] == [False, True, True]
    assert not any(ready.met_before(np.zeros(3)) for _ in range(3))  # at the same address
    others = [np.zeros(1) for _ in range(ready.MOST_MET)]
    assert not any(map(ready.met_before, others))
    assert len(ready._met) <= ready.MOST_MET
