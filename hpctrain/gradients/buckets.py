"""Buckets: slices of the gradient plane that travel together.

Backward finishes the last layer first, so the buckets are cut from the end of the plane:

    grad   | layer 0 ......... | layer 1 ..... | layer 2 | layer 3 |
    bucket |         2         |       1       |         0         |   sent in the order 0, 1, 2
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpctrain.gradients.arena import Slot


@dataclass(frozen=True)
class Bucket:
    """Elements `start:stop` of the gradient plane, and the slots that lie in them."""

    start: int
    stop: int
    names: frozenset[str]


def cut(slots: Iterable[Slot], length: int, itemsize: int, bucket_bytes: int) -> list[Bucket]:
    """Return buckets, last slots first, that cover a plane of `length` elements.

    A bucket is closed by the slot that makes it `bucket_bytes` or more; no slot is divided.
    """
    buckets: list[Bucket] = []
    stop, names = length, set()
    for slot in sorted(slots, key=lambda s: s.offset, reverse=True):
        names.add(slot.name)
        if (stop - slot.offset) * itemsize >= bucket_bytes or slot.offset == 0:
            buckets.append(Bucket(slot.offset, stop, frozenset(names)))
            stop, names = slot.offset, set()
    return buckets
