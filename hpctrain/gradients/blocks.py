"""A replica that computes a batch block by block: no bit depends on the number of ranks.

The global batch of n samples is cut into B *virtual blocks*: block b has the samples nb/B ..
n(b + 1)/B - 1, rounded down, for any number of ranks. Each is computed by itself, so the matrices
have the same shapes wherever it is computed, by one BLAS thread if the user asked for no other
number: with another BLAS adds in another order. The gradients of blocks are added in the tree of
`collectives/ordered.py`. One rank, four blocks, added as soon as possible:

    arena.grad   block 0     block 1     block 2     block 3
    planes       0           01          01, 2       01, then 01 + (2 + 3) slot by slot, as block 3
                                                     finishes them: they travel during backward

Peak memory: besides `arena.grad` as many planes as the tree keeps waiting, log2(B/P) where P and B
are powers of two, about twice that at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from hpctrain import config, nn
from hpctrain.collectives.ordered import Subtotal, SumTree, into_the_left
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.gradients.arena import Arena
from hpctrain.gradients.replica import Batch, Replica, ignore_ready
from hpctrain.transport.placement.core_binding import one_blas_thread

BLOCKS = 8  # if no number is given
NOTHING = nn.Sums(0.0, 0, 0)


@config.options
class ReductionOptions:
    """The keys of `[wire]` that also apply to a single rank."""

    reduction: Literal["fast", "ordered"] = "fast"  #: whether bits may depend on the ranks
    blocks: Annotated[int, Field(ge=1)] | None = None  #: of an ordered sum; 8 if not given

    def __post_init__(self) -> None:
        """Refuse a number of blocks for sums that have none."""
        if self.blocks is not None and self.reduction != "ordered":
            raise UsageError(
                f"[wire] blocks: expected reduction = 'ordered' beside it, seen '{self.reduction}'"
            )

    def tree(self, ranks: int) -> SumTree | None:
        """Return the order of sums over `ranks`, None if the order is free."""
        return SumTree(self.blocks or BLOCKS, ranks) if self.reduction == "ordered" else None


def in_order(table: np.ndarray) -> nn.Sums:
    """Return the totals of a table (blocks, 3) of Sums, float64, added from the first on."""
    return reduce(nn.add, (nn.Sums(loss, int(c), int(n)) for loss, c, n in table.tolist()), NOTHING)


class BlockReplica:
    """A Replica whose gradient is that of `replica`, computed in the blocks of one rank."""

    def __init__(self, replica: Replica, tree: SumTree, rank: int):
        """Raise UsageError for a model whose layers look at a batch as a whole."""
        if replica.arena.buffer.size:
            raise UsageError(
                "[wire] reduction is 'ordered', but the model normalizes over the batch, which is "
                "computed in blocks: expected a model without BatchNorm; take LayerNorm, or "
                "reduction = 'fast'"
            )
        one_blas_thread()
        #: Sums of each block of the step, (blocks, 3); zeros for blocks of other ranks
        self.table = np.zeros((tree.blocks, len(NOTHING)))
        self._replica, self._tree, self._run = replica, tree, tree.run(rank)
        self._slots = {slot.name: slot for slot in replica.arena.slots}
        self._planes: list[np.ndarray] = []
        self._subtotals: list[Subtotal] = []

    @property
    def arena(self) -> Arena:
        """The arena of the replica."""
        return self._replica.arena

    def move(self, **planes: np.ndarray) -> None:
        """Move planes to other arrays; see Replica."""
        self._replica.move(**planes)

    def evaluate(self, batch: Batch) -> nn.Sums:
        """Return the sums over `batch`, which is a part of a block; see Replica."""
        return self._replica.evaluate(batch)

    def gradient(
        self, batch: Batch, scale: float, key: nn.Key, on_ready: Callable[[str], None]
    ) -> nn.Sums:
        """Leave the sums of all blocks in `subtotals`, the last in `arena.grad`; see Replica.

        Returns the totals of this rank's blocks, in order.
        """
        run, samples = self._run, key.samples
        cuts = [samples * b // self._tree.blocks - key.first for b in (*run, run.stop)]
        if (cuts[0], cuts[-1]) != (0, len(batch.y)):
            raise HpctrainError(
                f"blocks {run.start} .. {run.stop - 1} of {samples} samples: expected samples "
                f"{cuts[0]} .. {cuts[-1]} of the share, seen a share of {len(batch.y)}"
            )
        self._subtotals = []
        for block, (start, stop) in zip(run, pairwise(cuts), strict=True):
            block_key = key._replace(first=key.first + start, sum_over_ranks=_refuse)
            last = block == run[-1]
            ready = partial(self._finish, self._last(block), on_ready) if last else ignore_ready
            part = Batch(batch.x[start:stop], batch.y[start:stop])
            self.table[block] = list(self._replica.gradient(part, scale, block_key, ready))
            if not last:
                self._keep(block)
        return in_order(self.table)

    def subtotals(self, at: slice) -> list[np.ndarray]:
        """Return elements `at` of the sums that this rank has, in the order of blocks."""
        return [subtotal.x[at] for subtotal in self._subtotals]

    def _keep(self, block: int) -> None:
        """Add the gradient of `block` to the subtotal that waits for it, or keep a copy of it."""
        grad = self.arena.grad
        self._tree.join(self._subtotals, Subtotal(block, block + 1, grad), into_the_left(np.add))
        if self._subtotals[-1].x is grad:
            plane = self._spare()
            plane[...] = grad
            self._subtotals[-1] = self._subtotals[-1]._replace(x=plane)

    def _last(self, block: int) -> list[np.ndarray]:
        """Append the last block; return the planes to be added to it, in order."""
        added: list[np.ndarray] = []

        def note(left: np.ndarray, right: np.ndarray) -> np.ndarray:
            added.append(left)
            return right

        self._tree.join(self._subtotals, Subtotal(block, block + 1, self.arena.grad), note)
        return added

    def _finish(
        self, added: Sequence[np.ndarray], on_ready: Callable[[str], None], name: str
    ) -> None:
        """Add the planes `added` to slot `name` of the last block, which is now final."""
        slot, grad = self._slots[name], self.arena.grad
        at = slice(slot.offset, slot.stop)
        for plane in added:
            np.add(plane[at], grad[at], out=grad[at])
        on_ready(name)

    def _spare(self) -> np.ndarray:
        """Return a plane that holds no subtotal."""
        used = [subtotal.x for subtotal in self._subtotals]
        for plane in self._planes:
            if not any(plane is x for x in used):
                return plane
        self._planes.append(np.zeros_like(self.arena.grad))
        return self._planes[-1]


def _refuse(numbers: np.ndarray) -> np.ndarray:
    """Refuse to add: blocks are computed one after the other, not all at once."""
    raise UsageError(
        "[wire] reduction is 'ordered', but a layer sums over ranks, as BatchNorm does: expected "
        "layers that look at each sample by itself; take others, or reduction = 'fast'"
    )
