"""Top-k: the largest elements of each matrix travel, the others wait and grow.

Rank i has gradient g_i and residual e_i, at first zero. For each matrix:

    a_i = g_i + e_i
    s_i = a_i where |a_i| is among its k largest, else 0          e_i <- a_i - s_i
    g   = s_1 + ... + s_P                                         in the order of ranks

so that the sum of all updates is that of all gradients, but for what is in the residuals now. Each
rank sends (index, value) pairs, k of a matrix, and all ranks gather those of all:

    rank 0   [7 0.3|2 -.9]                 [7 0.3|2 -.9|2 0.5|4 0.1|...]
    rank 1   [2 0.5|4 0.1]    all-gather   the same
    ...

Cost: P-1 steps, 8 k (P-1) bytes sent per rank for float32. That grows with P, where an all-reduce
does not: it is less than half of 8 n (P-1)/P bytes, the ring's, only for k/n < 1/(2P), and a
ratio of 1/P or more is refused. Vectors travel whole, by the all-reduce.

Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", 2018, who prove that it
converges as SGD does; Lin et al., "Deep gradient compression", 2018, who also keep momentum on
each rank and warm the ratio up. Here momentum is the optimizer's, which sees the sum.
"""

from __future__ import annotations

from math import ceil

import numpy as np

from hpctrain.collectives import AllReduceFunction, Group
from hpctrain.collectives.ring import all_gather
from hpctrain.errors import UsageError
from hpctrain.gradients.arena import Arena
from hpctrain.gradients.compress.places import Bookmarks, Places, slices

INDEX = np.dtype(np.uint32)


class TopK:
    """Sums the largest elements of each rank."""

    def __init__(self, allreduce: AllReduceFunction, arena: Arena, ratio: float, ranks: int):
        """Send `ratio` of each matrix of `arena`, at least one element of it."""
        if ratio * ranks >= 1:
            raise UsageError(
                f"[wire] compression_ratio: with {ranks} ranks expected less than 1/{ranks}, seen "
                f"{ratio}: index and value of each element, from each rank, would be more than "
                "the gradient; lower it, or take compression = 'none'"
            )
        if arena.grad.size > np.iinfo(INDEX).max:
            raise UsageError(
                "[wire] compression: top-k counts elements in 32 bits; expected fewer than "
                f"{np.iinfo(INDEX).max} of them, seen {arena.grad.size}; take 'powersgd'"
            )
        self._residual = np.zeros_like(arena.grad)
        self.own = {"residual": self._residual}
        self.shared: dict[str, np.ndarray] = {}
        self._allreduce, self._ratio = allreduce, ratio
        self._bookmarks = Bookmarks(arena, lambda slot: True)

    def __call__(self, group: Group, x: np.ndarray) -> None:
        """Sum flat `x`, a slice of the gradient plane, in place."""
        places = self._bookmarks.find(x)
        packed = places.pack(x)
        if packed.size:
            self._allreduce(group, packed, np.add)
        if places.matrices:
            block = self._take(places, x)
            x[...] = 0
            for row in _gathered(group, block):
                where, values = _pairs(row, x.dtype)
                x[where] += values
        places.unpack(packed, x)

    def _take(self, places: Places, x: np.ndarray) -> np.ndarray:
        """Return this rank's indices and values as one block; the rest becomes its residual."""
        counts = [ceil(self._ratio * slot.size) for slot in places.matrices]
        block = np.empty(sum(counts) * (INDEX.itemsize + x.itemsize), np.uint8)
        where, values = _pairs(block, x.dtype)
        for slot, part, k in zip(places.matrices, slices(counts), counts, strict=True):
            here, residual = places.of(x, slot), self._residual[slot.offset : slot.stop]
            residual += here
            # What is not a number counts as largest: it is sent, and so seen by all.
            largest = np.argpartition(abs(residual), -k)[-k:]
            where[part], values[part] = largest + (slot.offset - places.start), residual[largest]
            residual[largest] = 0
        return block


def _gathered(group: Group, block: np.ndarray) -> np.ndarray:
    """Return every rank's `block`, a row each."""
    rows = np.empty((group.link.size, block.size), np.uint8)
    rows[group.link.rank] = block
    all_gather(group, rows.reshape(-1))
    return rows


def _pairs(block: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices and the values in `block`: views."""
    count = block.size // (INDEX.itemsize + dtype.itemsize)
    # Values first: they may be of 8 bytes, and begin where the block does.
    values, where = np.split(block, [count * dtype.itemsize])
    return where.view(INDEX), values.view(dtype)
