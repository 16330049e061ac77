"""The update of parameters: every rank updates the whole model, or each rank its own range.

The second is the first stage of ZeRO. With three ranks, `g` the gradient of a rank's share, `G` the
sum over the shares, `w` old and `W` new parameters:

    rank   gradients       reduce-scatter   update          all-gather
     0     g g g  w w w    G . .  w w w     G . .  W w w    W W W
     1     g g g  w w w    . G .  w w w     . G .  w W w    W W W
     2     g g g  w w w    . . G  w w w     . . G  w w W    W W W

Both send 2n(P-1)/P bytes per rank; with ranges a rank keeps 1/P of the optimizer's state. Ranges
begin at blocks of the optimizer, and norms are added from the rows of the ranges in order: any
number of ranks makes the same update of the same sum. Source: Rajbhandari, Rasley, Ruwase and He,
"ZeRO: memory optimizations toward training trillion parameter models", 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.collectives import Group, Operation
from hpctrain.collectives.chunks import bounds
from hpctrain.collectives.copy_through import part_offsets
from hpctrain.collectives.ring import all_gather
from hpctrain.engines.engine import gather_rows
from hpctrain.engines.saved_state import (
    SavedState,
    pieces_of,
    range_pieces,
    request_range,
    request_state,
)
from hpctrain.engines.synchronous.gradient_sums import FastSums
from hpctrain.gradients.arena import Arena, Slot, identity, shift_slots, view_offset
from hpctrain.optim import Optimizer
from hpctrain.optim.optimizer import BLOCK_ELEMENTS, State
from hpctrain.transport.link import Link

#: `Times.wait` with a trace: encloses a wait, which has a name.
Wait = Callable[..., AbstractContextManager[None]]


class PartwiseUpdate:
    """An update by an optimizer without norms, part by part, in any order."""

    def __init__(
        self,
        optimizer: Optimizer,
        state: State,
        param: np.ndarray,
        slots: Sequence[Slot],
        parts: Iterable[slice],
    ):
        """`slots` have offsets that count from the first element of `param`."""
        self._optimizer, self._step = optimizer, state["step"]
        self._part_counts = self._step.copy()  # the optimizer counts a step in each part
        self._max_counts = np.zeros_like(self._step)  # the highest counts of any part
        self._parts = [self._part_state(state, param, slots, part) for part in parts]

    def __call__(self, number: int, gradient: np.ndarray) -> None:
        """Update part `number` with its gradient."""
        self._part_counts[...] = self._step
        self._optimizer.update(gradient, *self._parts[number], identity)
        np.maximum(self._max_counts, self._part_counts, out=self._max_counts)

    def count(self) -> None:
        """Count one update, after all of its parts."""
        self._step[0] += 1
        np.maximum(self._step, self._max_counts, out=self._step)
        self._max_counts[...] = 0

    def _part_state(
        self, state: State, param: np.ndarray, slots: Sequence[Slot], own_slice: slice
    ) -> tuple[State, np.ndarray, list[Slot]]:
        views = {name: x[own_slice] for name, x in state.items() if name != "step"}
        overlapping_slots = [
            s for s in slots if s.stop > own_slice.start and s.offset < own_slice.stop
        ]
        return (
            {**views, "step": self._part_counts},
            param[own_slice],
            shift_slots(own_slice.start, overlapping_slots),
        )


class Update:
    """The attributes of an update, and the values that most updates have."""

    is_replicated = False  #: whether each rank makes the whole update, at the end of the step
    #: The range of the sums that this rank checks; None: ranks do not wait for sums.
    own: slice | None = None
    on_need: Callable[[str], None] | None = None  #: called before a gradient reads a slot

    def settle(self) -> None:
        """Complete the update of the last step."""

    def own_length(self, length: int) -> int:
        """Return the number of elements that this rank updates, of planes of `length`."""
        return length


class ReplicatedUpdate(Update):
    """Every rank makes the same update of the whole model."""

    is_replicated = True

    def __init__(self, link: Link, arena: Arena, optimizer: Optimizer):
        """Keep the whole state."""
        self.state = optimizer.init(arena.param)
        self._arena, self._optimizer, self._link = arena, optimizer, link
        #: the range that `direct` sums on this rank
        self.own = slice(*part_offsets(arena.grad, link.size)[link.rank :][:2])

    def __call__(self, gradient: np.ndarray) -> None:
        """Update with a summed gradient, of the length of the plane."""
        arena = self._arena
        self._optimizer.update(gradient, self.state, arena.param, arena.layout, arena.gather_rows)

    def pieces(self) -> list[Piece]:
        """Return this rank's 1/P of the common state."""
        return pieces_of(self._arena, self.state, self._link.rank, self._link.size)

    def load(self, saved: SavedState) -> None:
        """Request the whole state."""
        request_state(self._arena, self.state, saved)


class ShardedUpdate(Update):
    """Each rank updates its own range of the parameters, and receives the other ranges."""

    own: slice

    def __init__(
        self,
        group: Group,
        arena: Arena,
        optimizer: Optimizer,
        sums: FastSums,
        wait: Wait,
    ):
        """Keep the state of this rank's range, which may be empty.

        The reduce-scatter of `sums` brings the sum of each range to its rank. `wait(name)` encloses
        waits.
        """
        self._group, self._arena, self._optimizer = group, arena, optimizer
        self._sums, self._wait = sums, wait
        rank, size = group.link.rank, group.link.size
        self._offsets = bounds(arena.param.size, size, BLOCK_ELEMENTS)
        #: the range of this rank
        self.own = slice(self._offsets[rank], self._offsets[rank + 1])
        self._slots = shift_slots(self.own.start, arena.layout)
        self.state = optimizer.init(arena.param[self.own])

    def own_length(self, length: int) -> int:
        """Return the length of this rank's range."""
        rank, size = self._group.link.rank, self._group.link.size
        offsets = bounds(length, size, BLOCK_ELEMENTS)
        return offsets[rank + 1] - offsets[rank]

    def reduce(self, group: Group, x: np.ndarray, op: Operation) -> None:
        """Sum slice `x` of the gradient plane, each element on the rank that updates it."""
        offset_before = view_offset(self._arena.grad, x)
        offsets = [min(max(offset - offset_before, 0), x.size) for offset in self._offsets]
        self._sums.reduce_scatter(group, x, op, offsets=offsets)

    def __call__(self, gradient: np.ndarray) -> None:
        """Update this rank's range with its summed gradient; gather the other ranges."""
        param, link = self._arena.param, self._group.link
        gather = partial(gather_rows_timed, link, self._arena, self._wait)
        self._optimizer.update(gradient[self.own], self.state, param[self.own], self._slots, gather)
        with self._wait("gather parameters"):
            all_gather(self._group, param, self._offsets)

    def pieces(self) -> list[Piece]:
        """Return this rank's range of the state, and its 1/P of the common arrays."""
        whole_slice = slice(0, self.own.stop - self.own.start)
        return range_pieces(self._arena, self.state, self.own.start, whole_slice, self._group.link)

    def load(self, saved: SavedState) -> None:
        """Request the parameters and this rank's range of the optimizer's state."""
        request_range(self._arena, self.state, self.own, saved)


def gather_rows_timed(link: Link, arena: Arena, wait: Wait, rows: np.ndarray) -> np.ndarray:
    """Return the rows of the whole model, see `gather_rows`; the time counts as waiting."""
    with wait("gather norms"):
        return gather_rows(link, arena, rows)
