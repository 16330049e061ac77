"""The tensors of a bucket, for a method that compresses matrices and keeps residuals.

    bucket    | 1.weight ........... |pad| 1.bias |pad| 2.weight ..... |pad| 2.bias |
    matrices  | compressed           |            | compressed         |
    whole                                | as it is |                      | as it is |

Vectors (tensors of one dim: biases, scales) are few bytes and are sent uncompressed, packed
together. So is a matrix that the method cannot make smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

from hpctrain.core.xp import Array, namespace
from hpctrain.gradients.arena import Arena, Slot, offset_in


@dataclass(frozen=True)
class BucketSlots:
    """The slots of a bucket that begins at element `start` of the plane."""

    start: int
    matrices: tuple[Slot, ...]
    whole: tuple[Slot, ...]

    def of(self, x: Array, slot: Slot) -> Array:
        """Return the view of bucket `x` that is `slot`, flat."""
        return x[slot.offset - self.start : slot.stop - self.start]

    def pack(self, x: Array, extra: int = 0) -> Array:
        """Return a new array of the uncompressed slots, with `extra` zeros behind them."""
        parts, xp = [self.of(x, slot) for slot in self.whole], namespace(x)
        return xp.concatenate([*parts, xp.zeros(extra, x.dtype)])

    def unpack(self, packed: Array, x: Array) -> None:
        """Copy the uncompressed slots back into bucket `x`."""
        for slot, part in zip(self.whole, slices(slot.size for slot in self.whole), strict=True):
            self.of(x, slot)[...] = packed[part]


class BucketSlotsCache:
    """The slots of every bucket of one plane, looked up by the address of the bucket."""

    def __init__(self, arena: Arena, shrinks: Callable[[Slot], bool]):
        """`shrinks(slot)`: whether a tensor of two dims or more is compressed."""
        self._arena, self._shrinks = arena, shrinks
        self._cache: dict[tuple[int, int], BucketSlots] = {}

    def find(self, x: Array) -> BucketSlots:
        """Return the slots in `x`, a slice of the gradient plane."""
        start = offset_in(self._arena.grad, x)
        if (start, x.size) not in self._cache:
            self._cache[start, x.size] = self._slots_between(start, start + x.size)
        return self._cache[start, x.size]

    def _slots_between(self, start: int, stop: int) -> BucketSlots:
        slots = [slot for slot in self._arena.slots if start <= slot.offset < stop and slot.size]
        matrices = [slot for slot in slots if len(slot.shape) > 1 and self._shrinks(slot)]
        whole = [slot for slot in slots if slot not in matrices]
        return BucketSlots(start, tuple(matrices), tuple(whole))


def slices(lengths: Iterable[int]) -> list[slice]:
    """Return consecutive slices of these lengths."""
    stops = list(accumulate(lengths))
    return [slice(a, b) for a, b in zip([0, *stops], stops)]  # noqa: B905
