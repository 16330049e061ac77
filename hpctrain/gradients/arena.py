"""The arena: all tensors of a model in flat planes, so that gradients are sent without packing.

A *slot* is the range of a tensor. Slots begin at multiples of 64 bytes (a cache line), and the
gap behind a slot is zero in every plane, so that an all-reduce or an update may include it.

    param  | 0.weight .............. |pad| 0.bias .. |pad| 1.weight ....... |
    grad   | the same layout                                                |
    buffer | 0.mean |pad| 0.variance |    not trained: a layout of its own

An arena may hold only some slots of a model, such as the slots of a pipeline's stage: *ranges* of
the whole model's plane. A range begins at an element congruent to its offset in that plane modulo
BLOCK_ELEMENTS, behind a gap of zeros where need be. So blocks of the optimizer end at the same
elements of the model however it is cut: shards, partial sums of norms and hashes are the same as on
a single rank. A gap costs less than a block, 256 KiB of float32, per plane and range.

    blocks     |        0        |        1        |        2        |
    one rank   | a a a a b b b b | b b b b c c c c | c d d d e e . . |
    b and e    | 0 0 0 0 b b b b | b b b b e e . . |
    c          | 0 0 0 0 c c c c | c
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing

from hpctrain.checkpoint import hashes
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, address_of, to_host
from hpctrain.optim.optimizer import BLOCK_ELEMENTS, GatherRows
from hpctrain.transport.shared_memory.host import aligned_zeros

ALIGN_BYTES = 64


@dataclass(frozen=True)
class Slot:
    """The range of a tensor: `size` elements from element `offset` on."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.offset + self.size


class Range(NamedTuple):
    """`size` elements that lie at `start` in an arena's planes, and at `offset` in the model's."""

    start: int
    offset: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class Share:
    """The part of a model's plane that one arena holds."""

    ranges: tuple[Range, ...]  #: ascending, in both senses
    slots: tuple[Slot, ...]  #: all slots of the model, in the model's plane
    size: int  #: elements of the model's plane


def identity(rows: np.ndarray) -> np.ndarray:
    """Return `rows`, which cover the whole model already."""
    return rows


@dataclass(frozen=True)
class Arena:
    """The planes of a model, or of some of its slots; each plane is one flat array."""

    slots: tuple[Slot, ...]
    param: Array
    grad: Array
    buffer_slots: tuple[Slot, ...] = ()
    buffer: Array = field(default_factory=lambda: np.zeros(0))
    share: Share | None = None  #: None: the whole model
    #: takes the rows of this arena's pieces, and returns the whole model's rows in the order of
    #: slots; see Optimizer. Collective over the arenas of a model
    gather_rows: GatherRows = identity
    #: buffers of integers, coded as integers.py describes: their dtypes, by name
    integers: Mapping[str, str] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)  #: further names of slots

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The ranges of the model's plane that this arena holds."""
        return (Range(0, 0, self.param.size),) if self.share is None else self.share.ranges

    @property
    def model_slots(self) -> tuple[Slot, ...]:
        """All slots of the model, in the model's plane."""
        return self.slots if self.share is None else self.share.slots

    @property
    def model_size(self) -> int:
        """The elements of the model's plane."""
        return self.param.size if self.share is None else self.share.size

    @property
    def has_first_slot(self) -> bool:
        """Whether the model's first slot is here: this arena's ranks save what all ranks hold."""
        return self.share is None or self.slots[:1] == self.layout[:1]

    @cached_property
    def layout(self) -> tuple[Slot, ...]:
        """All slots of the model for an optimizer of this arena's planes.

        Slots of other arenas lie beyond the plane, with as many pieces as in the model's plane.
        """
        own_slots = {slot.name: slot for slot in self.slots}
        beyond = -(-self.param.size // BLOCK_ELEMENTS) * BLOCK_ELEMENTS
        return tuple(
            own_slots.get(s.name, replace(s, offset=beyond + s.offset)) for s in self.model_slots
        )

    def spans(self, start: int, size: int) -> list[tuple[int, slice]]:
        """Return the parts of ranges in `size` elements from `start` on, as (offset, slice).

        Offsets count in the model's plane; slices count from `start`, and may be empty. No slice
        covers a gap in front of a range.
        """
        if self.share is None:
            return [(start, slice(0, size))]
        spans = []
        for held_range in self.share.ranges:
            first = min(max(held_range.start, start), held_range.stop)
            stop = max(first, min(held_range.stop, start + size))
            part = slice(max(first - start, 0), max(stop - start, 0))
            spans.append((held_range.offset + first - held_range.start, part))
        return spans

    def views(self, plane: Array) -> dict[str, Array]:
        """Return views of the tensors in a plane, by name."""
        slots = self.buffer_slots if plane is self.buffer else self.slots
        return {s.name: plane[s.offset : s.stop].reshape(s.shape) for s in slots}


def make_arena(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.typing.DTypeLike,
    buffers: Mapping[str, tuple[int, ...]] = {},
    zeros: Callable[[int, Any], Array] = aligned_zeros,
    own: Collection[str] | None = None,
) -> Arena:
    """Return a zeroed arena with a slot for each of `shapes` and of `buffers`, in their order.

    With `own` the arena holds only the named slots; UsageError for a model with buffers.
    `zeros(length, dtype)` allocates a plane on the host or on a device.
    """
    itemsize, share = np.dtype(dtype).itemsize, None
    slots, length = lay_out(shapes, itemsize)
    buffer_slots, buffer_length = lay_out(buffers, itemsize)
    if own is not None and set(own) != shapes.keys():
        if buffers:
            raise UsageError(
                "an arena of some slots of a model: expected a model without buffers, such as the "
                f"running statistics of BatchNorm, seen '{next(iter(buffers))}'"
            )
        if unknown_names := sorted(set(own) - shapes.keys()):
            raise ValueError(f"expected names of the model's slots, seen '{unknown_names[0]}'")
        ranges, own_slots = _cut_ranges(slots, length, own)
        share = Share(ranges, slots, length)
        slots, length = own_slots, ranges[-1].stop if ranges else 0
    param, grad, buffer = (zeros(n, dtype) for n in (length, length, buffer_length))
    return Arena(slots, param, grad, buffer_slots, buffer, share)


def lay_out(shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> tuple[tuple[Slot, ...], int]:
    """Return the slots and the length of a plane in elements."""
    slots, offset, alignment = [], 0, ALIGN_BYTES // itemsize
    for name, shape in shapes.items():
        slots.append(Slot(name, tuple(shape), offset))
        offset = -(-slots[-1].stop // alignment) * alignment
    return tuple(slots), offset


def _cut_ranges(
    slots: Sequence[Slot], length: int, own: Collection[str]
) -> tuple[tuple[Range, ...], tuple[Slot, ...]]:
    """Return a range for each run of consecutive slots in `own`, and the slots within the ranges.

    A run ends at the next other slot, or at `length`, the end of the model's plane.
    """
    stops = [*(slot.offset for slot in slots[1:]), length]
    ranges: list[Range] = []
    own_slots: list[Slot] = []
    end = 0
    for is_own, group in groupby(zip(slots, stops, strict=True), lambda pair: pair[0].name in own):
        if is_own:
            run = list(group)
            offset, stop = run[0][0].offset, run[-1][1]
            start = end + (offset - end) % BLOCK_ELEMENTS
            ranges.append(Range(start, offset, stop - offset))
            own_slots += shift_slots(offset - start, (slot for slot, _ in run))
            end = ranges[-1].stop
    return tuple(ranges), tuple(own_slots)


def view_offset(plane: Array, x: Array) -> int:
    """Return the element at which view `x` of flat `plane` begins."""

    return (address_of(x) - address_of(plane)) // plane.itemsize


def shift_slots(start: int, slots: Iterable[Slot]) -> list[Slot]:
    """Return the slots with offsets relative to element `start` of the plane."""
    return [replace(slot, offset=slot.offset - start) for slot in slots]


def slot_hashes(arena: Arena) -> dict[str, str]:
    """Return the hash of each slot of this arena, by name; see `hpctrain.checkpoint.hashes`."""
    param = to_host(arena.param)

    def unit_sha256(start: int, stop: int) -> str:
        return hashlib.sha256(param[start:stop].data).hexdigest()

    return {
        slot.name: hashes.slot_sha256((slot.offset, slot.stop), unit_sha256) for slot in arena.slots
    }


def combine_slot_hashes(arena: Arena, sha256_by_name: Mapping[str, str]) -> str:
    """Return the hash of a model's parameters, given the hash of each of its slots."""
    return hashes.combine_hashes(sha256_by_name[slot.name] for slot in arena.model_slots)


def params_sha256(arena: Arena) -> str:
    """Return the hash of the parameters, without the gaps, in an arena of the whole model."""
    return combine_slot_hashes(arena, slot_hashes(arena))
