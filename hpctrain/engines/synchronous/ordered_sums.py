"""Sums in the order of blocks: the same bits on any number of ranks.

    replica           the gradients of this rank's blocks, added as far as they can be
    reduce_scatter    those of all ranks, each element on one rank     (collectives/ordered.py)
    all_gather        the sums to all ranks, by the algorithm of the options

The losses of blocks are added in their order too: rank 0 returns those of a whole step, the others
none, so that sums over ranks and steps make the same additions on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hpctrain.collectives import AllReduceFunction, Group, Operation, ordered
from hpctrain.collectives.all_gathers import IN_MEMORY_ALL_GATHERS, AllGather
from hpctrain.collectives.ordered import SumTree
from hpctrain.collectives.ring import reduce_scatter
from hpctrain.gradients.arena import view_offset
from hpctrain.gradients.blocks import BlockReplica, add_in_order
from hpctrain.gradients.finite import GradientParts
from hpctrain.gradients.reducer import WireOptions
from hpctrain.gradients.replica import Replica
from hpctrain.nn import Sums
from hpctrain.tuning.select import find_all_gather, find_allreduce

#: Takes a few float64, returns their sums over all ranks, the same on each.
Add = Callable[[np.ndarray], np.ndarray]


class FastSums:
    """Sums in the order of the algorithm, which may depend on the number of ranks."""

    def __init__(self, replica: Replica, allreduce: AllReduceFunction):
        self.replica, self.allreduce, self.reduce_scatter = replica, allreduce, reduce_scatter
        #: Parts of this rank's gradient that are not in the arena's plane
        self.parts: GradientParts | None = None

    def step_sums(self, sums: Sums, add: Add) -> Sums:
        """Return `sums`: each rank reports its own share."""
        return sums


class OrderedSums:
    """Sums of gradients and losses over ranks, in an order that does not depend on the ranks."""

    def __init__(self, replica: Replica, tree: SumTree, rank: int, all_gather: AllGather):
        """Raise UsageError where the replica cannot be computed in blocks."""
        self.replica, self.allreduce = BlockReplica(replica, tree, rank), self.ordered
        self._tree, self._rank, self._all_gather = tree, rank, all_gather
        self.parts: GradientParts = self.replica.subtotals

    def reduce_scatter(
        self, group: Group, x: np.ndarray, op: Operation, offsets: Sequence[int] | None = None
    ) -> None:
        """Sum slice `x` of the gradient plane, each rank its own chunk of it."""
        ordered.reduce_scatter(group, self._tree, self._own_blocks(x), x, op, offsets)

    def ordered(self, group: Group, x: np.ndarray, op: Operation) -> None:
        """Sum slice `x` of the gradient plane, all of it on every rank."""
        in_memory = self._all_gather in IN_MEMORY_ALL_GATHERS
        scatter = ordered.reduce_scatter_in_memory if in_memory else ordered.reduce_scatter
        scatter(group, self._tree, self._own_blocks(x), x, op)
        self._all_gather(group, x)

    def _own_blocks(self, x: np.ndarray) -> list[np.ndarray]:
        start = view_offset(self.replica.arena.grad, x)
        return self.replica.subtotals(slice(start, start + x.size))

    def step_sums(self, sums: Sums, add: Add) -> Sums:
        """Return the sums of all shares on rank 0, none elsewhere."""
        table = self.replica.table
        total = add_in_order(add(table.ravel()).reshape(table.shape), self.replica.loss)
        return total if self._rank == 0 else {}


def make_gradient_sums(
    replica: Replica, options: WireOptions, rank: int, size: int
) -> FastSums | OrderedSums:
    """Return the sums of `[wire] reduction`."""
    if tree := options.tree(size):
        return OrderedSums(replica, tree, rank, find_all_gather(options.algorithm))
    return FastSums(replica, find_allreduce(options.algorithm))
