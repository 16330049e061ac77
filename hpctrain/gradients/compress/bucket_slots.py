"""The tensors of a bucket, for methods that compress matrices and keep residuals.

    bucket        | 1.weight ........... |pad| 1.bias |pad| 2.weight ..... |pad| 2.bias |
    matrices      |      1.weight        |                |    2.weight    |
    uncompressed                             | 1.bias |                        | 2.bias |

Vectors (1-d tensors: biases, scales) have few bytes and are sent uncompressed, packed
together. A matrix that the method cannot make smaller is also sent uncompressed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from hpctrain.core.xp import Array, namespace
from hpctrain.gradients.arena import Arena, Slot, view_offset
from hpctrain.optim.absent import ABSENT, Ranges


@dataclass(frozen=True)
class BucketSlots:
    """The slots of a bucket that begins at element `start` of the plane."""

    start: int
    matrices: tuple[Slot, ...]
    uncompressed: tuple[Slot, ...]
    has_marks: bool  #: whether slots without a gradient are marked, see optim/absent.py

    def view_slot(self, x: Array, slot: Slot) -> Array:
        """Return a flat view of `slot` in bucket `x`."""
        return x[slot.offset - self.start : slot.stop - self.start]

    def pack(self, x: Array, extra: int = 0) -> Array:
        """Return a new array with the uncompressed slots, followed by `extra` zeros."""
        parts, xp = [self.view_slot(x, slot) for slot in self.uncompressed], namespace(x)
        return xp.concatenate([*parts, xp.zeros(extra, x.dtype)])

    def unpack(self, packed: Array, x: Array) -> None:
        """Copy the uncompressed slots back into bucket `x`."""
        parts = consecutive_slices(slot.size for slot in self.uncompressed)
        for slot, part in zip(self.uncompressed, parts, strict=True):
            self.view_slot(x, slot)[...] = packed[part]

    def find_absent(self, x: Array) -> list[int]:
        """Return the indices of the matrices without a gradient in bucket `x`."""
        return self._ranges.find_absent(x) if self.has_marks else []

    def mark_absent(self, message: Array, parts: Sequence[slice], absent: Iterable[int]) -> None:
        """Mark the `absent` matrices, and no others, in `message`: `parts` has their elements."""
        if self.has_marks:
            message += 0.0  # -0.0 becomes 0.0
            for i in absent:
                message[parts[i]] = ABSENT

    @cached_property
    def _ranges(self) -> Ranges:
        return Ranges([slice(s.offset - self.start, s.stop - self.start) for s in self.matrices])


class BucketSlotsCache:
    """The slots of every bucket in a plane, looked up by the address of the bucket."""

    def __init__(self, arena: Arena, is_compressed: Callable[[Slot], bool], has_marks: bool):
        """`is_compressed(slot)`: whether a tensor of two dims or more is compressed."""
        self._arena, self._is_compressed, self._has_marks = arena, is_compressed, has_marks
        self._cache: dict[tuple[int, int], BucketSlots] = {}

    def find(self, x: Array) -> BucketSlots:
        """Return the slots in `x`, a slice of the gradient plane."""
        start = view_offset(self._arena.grad, x)
        if (start, x.size) not in self._cache:
            stop = start + x.size
            slots = [s for s in self._arena.slots if start <= s.offset < stop and s.size]
            matrices = [slot for slot in slots if len(slot.shape) > 1 and self._is_compressed(slot)]
            uncompressed = [slot for slot in slots if slot not in matrices]
            self._cache[start, x.size] = BucketSlots(
                start, tuple(matrices), tuple(uncompressed), self._has_marks
            )
        return self._cache[start, x.size]


def consecutive_slices(lengths: Iterable[int]) -> list[slice]:
    """Return consecutive slices of the given lengths."""
    stops = list(accumulate(lengths))
    return [slice(a, b) for a, b in zip([0, *stops], stops)]  # noqa: B905
