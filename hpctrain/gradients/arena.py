"""The arena: all tensors of a model in flat planes, so that gradients are sent without packing.

A *slot* is the range of one tensor. Slots begin at multiples of 64 bytes (a cache line), and the
gap behind a slot is zero in every plane, so that an all-reduce or an update may include it.

    param  | 0.weight .............. |pad| 0.bias .. |pad| 1.weight ....... |
    grad   | the same layout                                                |
    buffer | 0.mean |pad| 0.variance |    not trained: a layout of its own
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing

from hpctrain.checkpoint import hashes
from hpctrain.core.xp import Array, address_of, to_host
from hpctrain.transport.shared_memory.host import aligned_zeros

ALIGN_BYTES = 64


@dataclass(frozen=True)
class Slot:
    """The range of one tensor: `size` elements from element `offset` on."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True)
class Arena:
    """The planes of one model; each plane is one flat array, divided into slots."""

    slots: tuple[Slot, ...]
    param: Array
    grad: Array
    buffer_slots: tuple[Slot, ...] = ()
    buffer: Array = field(default_factory=lambda: np.zeros(0))

    def views(self, plane: Array) -> dict[str, Array]:
        """Return views of the tensors in a plane, by name."""
        slots = self.buffer_slots if plane is self.buffer else self.slots
        return {s.name: plane[s.offset : s.stop].reshape(s.shape) for s in slots}


def make_arena(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.typing.DTypeLike,
    buffers: Mapping[str, tuple[int, ...]] = {},
    zeros: Callable[[int, Any], Array] = aligned_zeros,
) -> Arena:
    """Return a zeroed arena with a slot for each of `shapes` and of `buffers`, in their order.

    `zeros(length, dtype)` allocates a plane on the host or on a device.
    """
    slots, length = lay_out(shapes, np.dtype(dtype).itemsize)
    buffer_slots, buffer_length = lay_out(buffers, np.dtype(dtype).itemsize)
    param, grad, buffer = (zeros(n, dtype) for n in (length, length, buffer_length))
    return Arena(slots, param, grad, buffer_slots, buffer)


def lay_out(shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> tuple[tuple[Slot, ...], int]:
    """Return the slots and the length of a plane in elements."""
    slots, offset, alignment = [], 0, ALIGN_BYTES // itemsize
    for name, shape in shapes.items():
        slots.append(Slot(name, tuple(shape), offset))
        offset = -(-slots[-1].stop // alignment) * alignment
    return tuple(slots), offset


def view_offset(plane: Array, x: Array) -> int:
    """Return the element at which view `x` of flat `plane` begins."""

    return (address_of(x) - address_of(plane)) // plane.itemsize


def shift_slots(start: int, slots: Iterable[Slot]) -> list[Slot]:
    """Return the slots with offsets relative to element `start` of the plane."""
    return [replace(slot, offset=slot.offset - start) for slot in slots]


def params_sha256(arena: Arena) -> str:
    """Return the hash of all parameters, without the gaps; see `hpctrain.checkpoint.hashes`."""
    param = to_host(arena.param)

    def unit_sha256(start: int, stop: int) -> str:
        return hashlib.sha256(param[start:stop].data).hexdigest()

    return hashes.combine_hashes(
        hashes.slot_sha256((slot.offset, slot.stop), unit_sha256) for slot in arena.slots
    )
