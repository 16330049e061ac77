"""How gradients are summed over ranks: fast, compressed, or in an order independent of the ranks.

**Fast** sums are made in the order of the all-reduce, which may depend on the number of ranks.

**Compressed** sums keep state between steps, which is part of checkpoints:

    compression.residual      | rank 0's plane | rank 1's plane | ... | rank P-1's plane |
    compression.powersgd_q    equal on all ranks: each saves 1/P

A residual is the part of gradients that was not sent yet. The same number of ranks load each its
own, and the run continues bit for bit. Of another number each loads 1/P of the sum, which
stays the same, also for another method with residuals.

**Ordered** sums are made in the order of blocks, and have the same bits on any number of ranks:

    replica           the gradients of this rank's blocks, added as far as they can be
    reduce_scatter    the sums over all ranks, an element on one rank  (collectives/ordered.py)
    all_gather        the sums to all ranks, by the algorithm of the options

The losses of blocks are added in their order too: rank 0 returns the losses of a whole step, the
other ranks none, so that sums over ranks and steps make the same additions on any number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.collectives import AllReduceFunction, Group, Operation, ordered
from hpctrain.collectives.all_gathers import IN_MEMORY_ALL_GATHERS, AllGather
from hpctrain.collectives.ordered import SumTree
from hpctrain.collectives.ring import reduce_scatter
from hpctrain.core.errors import UsageError
from hpctrain.engines.saved_state import (
    SavedState,
    array_pieces,
    divide,
    plane_pieces,
    request_plane,
)
from hpctrain.gradients import compress
from hpctrain.gradients.arena import view_offset
from hpctrain.gradients.blocks import BlockReplica, add_in_order
from hpctrain.gradients.compress import Compressor
from hpctrain.gradients.finite import GradientParts
from hpctrain.gradients.reducer import WireOptions
from hpctrain.gradients.replica import Replica
from hpctrain.nn import Sums, losses
from hpctrain.transport.link import Link
from hpctrain.tuning.select import find_all_gather, find_allreduce
from hpctrain.world import World

log = logging.getLogger(__name__)
PREFIX = "compression."
#: Takes a few float64, returns their sums over all ranks, the same on each.
Add = Callable[[np.ndarray], np.ndarray]


class FastSums:
    """Sums in the order of the algorithm."""

    is_exact = True  #: whether nothing of a gradient is kept back for later steps
    #: Parts of this rank's gradient that are not in the arena's plane
    parts: GradientParts | None = None

    def __init__(self, replica: Replica, allreduce: AllReduceFunction, link: Link):
        self.replica, self.allreduce, self._link = replica, allreduce, link
        self.reduce_scatter: Callable[..., object] = reduce_scatter

    def begin(self) -> None:
        """Begin a step, which `undo` may undo."""

    def undo(self) -> None:
        """Restore the state from before the step."""

    def fault(self) -> str:
        """Return the fault of the sums of this step that all ranks hold; empty if there is none."""
        return ""

    def step_sums(self, sums: Sums, add: Add, on_all_ranks: bool) -> Sums:
        """Return this rank's `sums`, or `on_all_ranks` the sums over the ranks."""
        terms = self.replica.loss.terms
        return losses.unpack(add(losses.pack(sums, terms)), terms) if on_all_ranks else sums

    def pieces(self) -> list[Piece]:
        """Return this rank's part of the state."""
        return []

    def load(self, saved: SavedState) -> None:
        """Request this rank's part of the state."""
        if self._link.rank == 0:
            warn_of_residuals(saved)


class CompressedSums(FastSums):
    """Sums by a compressed all-reduce."""

    is_exact = False

    def __init__(self, replica: Replica, compressor: Compressor, link: Link):
        super().__init__(replica, compressor, link)
        self.compressor = compressor

    def begin(self) -> None:
        """Save the residuals."""
        self.compressor.begin()

    def undo(self) -> None:
        """Restore the residuals from before the step."""
        self.compressor.undo()

    def fault(self) -> str:
        """Return the fault of the compressed sums, which are the same on all ranks."""
        if self.compressor.sums_are_finite():
            return ""
        method = f"[wire] compression = '{self.compressor.__name__}'"
        return f"the sum of gradients, with {method}, is not finite"

    def pieces(self) -> list[Piece]:
        """Return this rank's own arrays, and its 1/P of the common arrays."""
        arena, rank, size = self.replica.arena, self._link.rank, self._link.size
        pieces: list[Piece] = []
        for name, x in self.compressor.local_state.items():
            pieces += plane_pieces(arena, PREFIX + name, x, number=rank, count=size)
        for name, x in self.compressor.shared_state.items():
            pieces += array_pieces(arena, PREFIX + name, x, rank, size)
        return pieces

    def load(self, saved: SavedState) -> None:
        """Request this rank's arrays; arrays saved with another PowerSGD rank are not read."""
        for name, x in self.compressor.local_state.items():
            if PREFIX + name in saved.sizes:
                self._request_residual(x, PREFIX + name, saved)
            else:
                x[...] = 0
        for name, x in self.compressor.shared_state.items():
            if saved.sizes.get(PREFIX + name) == x.size:
                saved.request_deferred(PREFIX + name, x)
        if "residual" not in self.compressor.local_state:
            super().load(saved)

    def _request_residual(self, x: np.ndarray, name: str, saved: SavedState) -> None:
        """Request this rank's residual `x` from the checkpoint's residuals."""
        arena, saved_size, size = self.replica.arena, saved.sizes[name], self._link.size
        if saved_size % arena.model_size:
            raise UsageError(
                "the checkpoint does not fit the recipe: expected residuals of "
                f"{arena.model_size} numbers, seen {saved_size} in all; resume with the model of "
                "the checkpoint"
            )
        if saved_size == size * arena.model_size:
            request_plane(arena, name, x, saved.request, number=self._link.rank, count=size)
        else:
            request_plane(arena, name, x, saved.request_sum)
            saved.on_arrival(partial(divide, x, size))


class OrderedSums(FastSums):
    """Sums of gradients and losses over ranks, in an order that does not depend on the ranks."""

    replica: BlockReplica

    def __init__(self, replica: Replica, tree: SumTree, all_gather: AllGather, link: Link):
        """Raise UsageError where the replica cannot be computed in blocks."""
        super().__init__(BlockReplica(replica, tree, link.rank), self.ordered, link)
        self.reduce_scatter = self._reduce_scatter
        self.parts = self.replica.subtotals
        self._tree, self._all_gather = tree, all_gather

    def _reduce_scatter(
        self, group: Group, x: np.ndarray, op: Operation, offsets: Sequence[int] | None = None
    ) -> None:
        """Sum slice `x` of the gradient plane; each rank gets the sum of its own chunk."""
        ordered.reduce_scatter(group, self._tree, self._own_subtotals(x), x, op, offsets)

    def ordered(self, group: Group, x: np.ndarray, op: Operation) -> None:
        """Sum slice `x` of the gradient plane; every rank gets the whole sum."""
        in_memory = self._all_gather in IN_MEMORY_ALL_GATHERS
        scatter = ordered.reduce_scatter_in_memory if in_memory else ordered.reduce_scatter
        scatter(group, self._tree, self._own_subtotals(x), x, op)
        self._all_gather(group, x)

    def _own_subtotals(self, x: np.ndarray) -> list[np.ndarray]:
        start = view_offset(self.replica.arena.grad, x)
        return self.replica.subtotals(slice(start, start + x.size))

    def step_sums(self, sums: Sums, add: Add, on_all_ranks: bool) -> Sums:
        """Return a step's sums on rank 0, or `on_all_ranks`, and none elsewhere."""
        table = self.replica.table
        total = add_in_order(add(table.ravel()).reshape(table.shape), self.replica.loss)
        return total if on_all_ranks or self._link.rank == 0 else {}


def make_gradient_sums(
    world: World, replica: Replica, options: WireOptions, skips_absent: bool
) -> FastSums:
    """Return the sums of `[wire] reduction` and `compression`; collective.

    `skips_absent`: whether the optimizer needs the marks of slots without a gradient.
    """
    if tree := options.tree(world.size):
        return OrderedSums(replica, tree, find_all_gather(options.algorithm), world.link)
    allreduce = find_allreduce(options.algorithm)
    compressor = compress.build(
        options, allreduce, replica.arena, world.size, world.memory.zeros_like, skips_absent
    )
    if compressor is not None:
        return CompressedSums(replica, compressor, world.link)
    return FastSums(replica, allreduce, world.link)


def warn_of_residuals(saved: SavedState) -> None:
    """Warn if the checkpoint has residuals, which an engine without them does not load."""
    if PREFIX + "residual" in saved.sizes:
        log.warning("the gradients that compression kept back before the checkpoint are dropped")
