"""Slots without a gradient: parameters that the loss of a step does not depend on.

A replica marks such a slot with -0.0 in each element, and writes no -0.0 into other gradients. As
-0.0 is the neutral element of addition, a sum over pieces of a batch, blocks and ranks has the mark
where no rank has a gradient, and nowhere else: an optimizer then leaves the slot alone, however
many ranks there are. A range of a slot has the mark if and only if the whole slot has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from hpctrain.core.xp import Array, namespace, on_device, to_host
from hpctrain.optim.norms import slot_pieces
from hpctrain.optim.optimizer import (
    BLOCK_ELEMENTS,
    GatherRows,
    Optimizer,
    State,
    TensorSlot,
    Update,
    planes,
)

ABSENT = -0.0  #: each element of the gradient of a slot that has none


def skip_absent(optimizer: Optimizer) -> Optimizer:
    """Return `optimizer` that changes neither parameters nor planes of slots without a gradient.

    Its count of updates is common to all slots, so that it goes on.
    """
    if optimizer.skips_absent:
        return optimizer
    update = partial(_update_present, optimizer.update, _SlotRanges())
    return optimizer._replace(update=update, skips_absent=True)


class Ranges:
    """Ranges of an array, none of them empty, with the indices of their first elements."""

    def __init__(self, parts: Sequence[slice]):
        self.parts = parts
        self._starts = np.fromiter((part.start for part in parts), np.int64, len(parts))

    def find_absent(self, grad: Array) -> list[int]:
        """Return the indices of the ranges that have no gradient."""
        first_elements = grad[namespace(grad).asarray(self._starts)]
        if not on_device(grad) and first_elements.all():  # as of most gradients: none is zero
            return []
        candidates: list[int] = to_host(_has_mark(first_elements)).nonzero()[0].tolist()
        return [i for i in candidates if is_absent(grad[self.parts[i]])]


class _SlotRanges:
    """The ranges of the slots in an array; the next update mostly has the same."""

    def __init__(self) -> None:
        self._last_ranges: tuple[int, Sequence[TensorSlot], Ranges] = (0, (), Ranges([]))

    def of(self, size: int, slots: Sequence[TensorSlot]) -> Ranges:
        """Return the ranges of `slots` in `size` elements."""
        last = self._last_ranges
        if size != last[0] or slots is not last[1]:  # replaced at once: threads share optimizers
            parts = [part for _, part in slot_pieces(size, slots)]
            last = self._last_ranges = size, slots, Ranges(parts)
        return last[2]


def _update_present(
    update: Update,
    slot_ranges: _SlotRanges,
    grad: Array,
    state: State,
    param: Array,
    slots: Sequence[TensorSlot],
    gather_rows: GatherRows,
) -> None:
    ranges = slot_ranges.of(param.size, slots)
    absent_parts = [ranges.parts[i] for i in ranges.find_absent(grad)]
    arrays = [param, *planes(state).values()]
    saved_values = [(x[part], x[part].copy()) for part in absent_parts for x in arrays]
    update(grad, state, param, slots, gather_rows)
    for view, value in saved_values:
        view[...] = value


def is_absent(grad: Array) -> bool:
    """Return whether each element of flat `grad` is the mark."""
    starts = range(0, grad.size, BLOCK_ELEMENTS)  # most other gradients end the search at once
    return all(to_host(_has_mark(grad[i : i + BLOCK_ELEMENTS]).all()) for i in starts)


def _has_mark(x: Array) -> Array:
    return namespace(x).signbit(x) & (x == 0)
