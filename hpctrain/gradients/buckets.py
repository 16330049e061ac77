"""Buckets: slices of the gradient plane that are reduced together.

Backward finishes the last layer first, so bucket 0 lies at the end of the plane:

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
    """Elements `start:stop` of the gradient plane, and the names of the slots in this range."""

    start: int
    stop: int
    names: frozenset[str]


def cut_buckets(
    slots: Iterable[Slot], length: int, itemsize: int, bucket_bytes: int
) -> list[Bucket]:
    """Return buckets, last slots first, that cover a plane of `length` elements.

    A bucket ends with the slot that makes it `bucket_bytes` or larger; no slot is divided. The gap
    in front of the first slot, if any, belongs to its bucket.
    """
    buckets: list[Bucket] = []
    stop, names = length, set()
    last_first = sorted(slots, key=lambda s: s.offset, reverse=True)
    for slot in last_first:
        names.add(slot.name)
        start = 0 if slot.offset == last_first[-1].offset else slot.offset
        if (stop - start) * itemsize >= bucket_bytes or start == 0:
            buckets.append(Bucket(start, stop, frozenset(names)))
            stop, names = start, set()
    return buckets


class BucketProgress:
    """The progress of a step: slots become ready one by one, buckets are sent in fixed order."""

    def __init__(self, buckets: Sequence[Bucket]):
        """Begin the first step, in which no slot of `buckets` is ready."""
        self._buckets = buckets
        self._bucket_of = {name: i for i, b in enumerate(buckets) for name in b.names}
        self._missing_names = [set(bucket.names) for bucket in buckets]
        self._sent_count = 0  # buckets sent in this step

    def bucket_number(self, name: str) -> int | None:
        """Return the number of the bucket of slot `name`; None if it has none."""
        return self._bucket_of.get(name)

    def mark_ready(self, name: str) -> range:
        """Mark slot `name` as final; return the buckets that may be sent now."""
        missing_names = self._missing_names[self._bucket_of[name]]
        if name not in missing_names:
            raise HpctrainError(f"on_ready fired twice for slot '{name}'")
        missing_names.remove(name)
        first_bucket = self._sent_count
        while (
            self._sent_count < len(self._missing_names)
            and not self._missing_names[self._sent_count]
        ):
            self._sent_count += 1
        return range(first_bucket, self._sent_count)

    def finish_step(self) -> None:
        """Check that every slot was marked ready, and begin the next step."""
        if missing_names := sorted(set().union(*self._missing_names)):
            raise HpctrainError(f"on_ready never fired for slots: {', '.join(missing_names)}")
        self._missing_names, self._sent_count = [set(b.names) for b in self._buckets], 0
