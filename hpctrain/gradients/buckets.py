"""Buckets: slices of the gradient plane that are reduced together.

Backward finishes the last layer first, so the buckets are cut from the end of the plane:

    grad   | layer 0 ......... | layer 1 ..... | layer 2 | layer 3 |
    bucket |         2         |       1       |         0         |   sent in the order 0, 1, 2
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpctrain.core.errors import HpctrainError
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


class BucketProgress:
    """The progress of a step: buckets fill slot by slot, and are sent in a fixed order."""

    def __init__(self, buckets: Sequence[Bucket]):
        """Begin the first step, with all of `buckets` empty."""
        self._bucket_of = {name: i for i, b in enumerate(buckets) for name in b.names}
        self._names = [bucket.names for bucket in buckets]
        self._missing = [set(names) for names in self._names]
        self._sent = 0  # buckets, in this step

    def bucket(self, name: str) -> int | None:
        """Return the number of the bucket of slot `name`; None if it has none."""
        return self._bucket_of.get(name)

    def ready(self, name: str) -> range:
        """Mark slot `name` as final; return the buckets that may be sent now."""
        missing = self._missing[self._bucket_of[name]]
        if name not in missing:
            raise HpctrainError(f"on_ready fired twice for slot '{name}'")
        missing.remove(name)
        first = self._sent
        while self._sent < len(self._missing) and not self._missing[self._sent]:
            self._sent += 1
        return range(first, self._sent)

    def complete(self) -> None:
        """Check that every slot was ready, and begin the next step."""
        if silent := sorted(set().union(*self._missing)):
            raise HpctrainError(f"on_ready never fired for slots: {', '.join(silent)}")
        self._missing, self._sent = [set(names) for names in self._names], 0
