"""Sums over targets, by name: the sums of shares can be added, whatever their sizes.

    {"loss": Total(sum=46.1, count=20), "accuracy": Total(sum=13, count=20)}

A sample has one target, its label, or several: a text has one at each position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Total(NamedTuple):
    """The sum of `count` numbers."""

    sum: float
    count: float  # type: ignore[assignment]  # hides tuple.count, which is not used

    @property
    def mean(self) -> float | None:
        """The mean; None of no numbers."""
        return self.sum / self.count if self.count else None


Sums = dict[str, Total]


class PendingSums(NamedTuple):
    """Sums computed on a device, with an asynchronous copy to the host under way."""

    fetch_numbers: Callable[[], np.ndarray]  #: waits for the numbers, float64 (n,)
    make_sums: Callable[..., Sums]  #: called with the n numbers; raises UsageError

    def wait(self) -> Sums:
        """Wait for the sums and return them; raise UsageError for invalid targets."""
        return self.make_sums(*self.fetch_numbers().tolist())


def wait_for_sums(sums: Sums | PendingSums) -> Sums:
    """Return `sums` on the host; wait only for the sums, not for other work of the device."""
    return sums.wait() if isinstance(sums, PendingSums) else sums


def zero_sums(names: Iterable[str]) -> Sums:
    """Return the sums of no numbers."""
    return dict.fromkeys(names, Total(0.0, 0.0))


def add(a: Sums, b: Sums) -> Sums:
    """Return the sums of `a` and `b` together; a missing name counts as zero."""
    if not a:
        return b
    return a | {
        name: Total(a[name].sum + total.sum, a[name].count + total.count) if name in a else total
        for name, total in b.items()
    }


def pack(sums: Sums, names: Sequence[str]) -> np.ndarray:
    """Return sum and count for each name in `names`, float64 (2 names,); zeros if it lacks."""
    return np.array([sums.get(name, (0.0, 0.0)) for name in names], np.float64).ravel()


def unpack(numbers: np.ndarray, names: Sequence[str]) -> Sums:
    """Return the Sums that `pack` wrote."""
    pairs = numbers.reshape(len(names), 2).tolist()
    return {name: Total(total, count) for name, (total, count) in zip(names, pairs, strict=True)}
