"""A replica that computes a batch block by block: no bit depends on the number of ranks.

The global batch of n samples is divided into B *virtual blocks*: block b has the samples nb/B ..
n(b + 1)/B - 1, rounded down, for any number of ranks. Each block is computed separately, so its
matrices have the same shapes on any rank. BLAS uses one thread unless the user set another number,
because the order of its additions depends on the number of threads. The gradients of blocks are
added in the tree of `collectives/ordered.py`. One rank, four blocks, added as soon as possible:

    arena.grad   block 0     block 1     block 2     block 3
    planes       0           01          01, 2       01, then 01 + (2 + 3) slot by slot, as block 3
                                                     finishes them: they are sent during backward

Peak memory: `arena.grad`, and one plane per subtotal that waits in the tree: log2(B/P) planes if P
and B are powers of two, at most about twice as many otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from hpctrain import nn
from hpctrain.collectives.ordered import Subtotal, SumTree, make_in_place_add
from hpctrain.core import config
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.gradients.replica import (
    Batch,
    Replica,
    WrappedReplica,
    ignore_ready,
    mean_factor,
)
from hpctrain.transport.placement.core_binding import limit_blas_to_one_thread

DEFAULT_BLOCKS = 8


@config.options
class ReductionOptions:
    """The keys of `[wire]` that also apply to a single rank."""

    reduction: Literal["fast", "ordered"] = "fast"  #: whether bits may depend on the ranks
    blocks: Annotated[int, Field(ge=1)] | None = None  #: of an ordered sum; the default is 8

    def __post_init__(self) -> None:
        """Raise UsageError for a number of blocks without an ordered sum."""
        if self.blocks is not None and self.reduction != "ordered":
            raise UsageError(
                f"[wire] blocks: expected reduction = 'ordered' beside it, seen '{self.reduction}'"
            )

    def tree(self, ranks: int) -> SumTree | None:
        """Return the tree of ordered sums over `ranks`; None for fast sums."""
        if self.reduction == "fast":
            return None
        return SumTree(self.blocks or DEFAULT_BLOCKS, ranks)


def add_in_order(table: np.ndarray, loss: nn.Loss) -> nn.Sums:
    """Return the sums of a table of packed Sums, a row per block, added from the first row on."""
    rows = (nn.losses.unpack(row, loss.terms) for row in table)
    return reduce(nn.add, rows, {})


class BlockReplica(WrappedReplica):
    """A Replica that computes the gradient of `replica` in this rank's virtual blocks."""

    def __init__(self, replica: Replica, tree: SumTree, rank: int):
        """Raise UsageError for a model with layers that use statistics of the whole batch."""
        if replica.normalizes_batch:
            raise UsageError(
                "[wire] reduction is 'ordered', but the model normalizes over the batch, which is "
                "computed in blocks: expected a model without BatchNorm; use LayerNorm, or "
                "reduction = 'fast'"
            )
        limit_blas_to_one_thread()
        #: Packed Sums of each block of the step; zeros for blocks of other ranks
        self.table = np.zeros((tree.blocks, 2 * len(replica.loss.terms)))
        self.loss = replica.loss
        super().__init__(replica)
        self._tree, self._own_blocks = tree, tree.blocks_of(rank)
        self._slots = {slot.name: slot for slot in replica.arena.slots}
        self._planes: list[np.ndarray] = []
        self._subtotals: list[Subtotal] = []

    def gradient(
        self, batch: Batch, scale: float, key: nn.Key, on_ready: Callable[[str], None]
    ) -> nn.Sums:
        """Compute the gradient of each block, and add it to `subtotals`; see Replica.

        The last subtotal is `arena.grad`. Returns the totals of this rank's blocks.
        """
        own_blocks, samples = self._own_blocks, key.samples
        key = key._replace(mean_factor=mean_factor(self.loss, batch, key))
        indices = (*own_blocks, own_blocks.stop)
        bounds = [samples * b // self._tree.blocks - key.first for b in indices]
        if (bounds[0], bounds[-1]) != (0, batch.n):
            raise HpctrainError(
                f"blocks {own_blocks.start} .. {own_blocks.stop - 1} of {samples} samples: "
                f"expected samples {bounds[0]} .. {bounds[-1]} of the share, seen a share of "
                f"{batch.n}"
            )
        self._subtotals = []
        for block, (start, stop) in zip(own_blocks, pairwise(bounds), strict=True):
            block_key = key._replace(first=key.first + start, sum_over_ranks=_refuse_sum_over_ranks)
            is_last = block == own_blocks[-1]
            block_on_ready: Callable[[str], None] = ignore_ready
            if is_last:
                block_on_ready = partial(self._finish_slot, self._join_last_block(block), on_ready)
            block_batch = batch.part(start, stop)
            metric_sums = self._replica.gradient(block_batch, scale, block_key, block_on_ready)
            self.table[block] = nn.losses.pack(metric_sums, self.loss.terms)
            if not is_last:
                grad = self.arena.grad
                self._tree.append_subtotal(
                    self._subtotals, Subtotal(block, block + 1, grad), make_in_place_add(np.add)
                )
                if self._subtotals[-1].x is grad:
                    plane = self._find_free_plane()
                    plane[...] = grad
                    self._subtotals[-1] = self._subtotals[-1]._replace(x=plane)
        return add_in_order(self.table, self.loss)

    def subtotals(self, elements: slice) -> list[np.ndarray]:
        """Return a range of the subtotals of this rank, in the order of blocks."""
        return [subtotal.x[elements] for subtotal in self._subtotals]

    def _join_last_block(self, block: int) -> list[np.ndarray]:
        """Append the last block; return the planes that must be added to it, in order."""
        waiting_planes: list[np.ndarray] = []

        def record_left(left: np.ndarray, right: np.ndarray) -> np.ndarray:
            waiting_planes.append(left)
            return right

        self._tree.append_subtotal(
            self._subtotals, Subtotal(block, block + 1, self.arena.grad), record_left
        )
        return waiting_planes

    def _finish_slot(
        self, waiting_planes: Sequence[np.ndarray], on_ready: Callable[[str], None], name: str
    ) -> None:
        """Add `waiting_planes` to slot `name` of the last block, whose gradient is now final."""
        slot, grad = self._slots[name], self.arena.grad
        elements = slice(slot.offset, slot.stop)
        for plane in waiting_planes:
            np.add(plane[elements], grad[elements], out=grad[elements])
        on_ready(name)

    def _find_free_plane(self) -> np.ndarray:
        """Return a plane that holds no subtotal."""
        used_planes = [subtotal.x for subtotal in self._subtotals]
        for plane in self._planes:
            if not any(plane is x for x in used_planes):
                return plane
        self._planes.append(np.zeros_like(self.arena.grad))
        return self._planes[-1]


def _refuse_sum_over_ranks(numbers: np.ndarray) -> np.ndarray:
    """Raise UsageError: ranks compute several blocks in turn, so layers cannot sum over ranks."""
    raise UsageError(
        "[wire] reduction is 'ordered', but a layer sums over ranks, as BatchNorm does: expected "
        "layers that treat each sample separately; use such layers, or reduction = 'fast'"
    )
