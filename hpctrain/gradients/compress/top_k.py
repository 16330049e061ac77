"""Top-k: the largest elements of each matrix are sent, the others stay in a residual.

Rank i has gradient g_i and residual e_i, at first zero. For each matrix:

    a_i = g_i + e_i
    s_i = a_i where |a_i| is among its k largest, else 0          e_i <- a_i - s_i
    g   = s_1 + ... + s_P                                         in the order of ranks

so that the sum of all updates is the sum of all gradients less the present residuals. Each rank
sends (index, value) pairs, k per matrix, and all ranks gather the pairs of all:

    rank 0   [7 0.3|2 -.9]                 [7 0.3|2 -.9|2 0.5|4 0.1|...]
    rank 1   [2 0.5|4 0.1]    all-gather   the same
    ...

Cost: P-1 steps, 8 k (P-1) bytes sent per rank for float32. That grows with P, where an all-reduce
does not: it is less than half of 8 n (P-1)/P bytes, the ring's, only for k/n < 1/(2P), and a
ratio of 1/P or more is refused. Vectors are summed uncompressed, by the all-reduce.

Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", 2018, who prove that it
converges as SGD does; Lin et al., "Deep gradient compression", 2018, who also keep momentum on
each rank and warm the ratio up. Here momentum is the optimizer's, which sees the sum.

On a GPU our own kernels select the largest, see top_k_cuda.py; pairs stay in its memory.
"""

from __future__ import annotations

from math import ceil

import numpy as np

from hpctrain.collectives import AllReduceFunction, Group
from hpctrain.collectives.group import Scratch
from hpctrain.collectives.ring import all_gather
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, namespace, on_device
from hpctrain.gradients.arena import Arena
from hpctrain.gradients.compress.bucket_slots import BucketSlots, BucketSlotsCache, slices
from hpctrain.gradients.compress.top_k_cuda import Largest, add_pairs

INDEX = np.dtype(np.uint32)
ROW_BYTES = 8  #: messages are padded to multiples of this, the alignment of reads on a GPU


def must_send_less(ratio: float, ranks: int) -> None:
    """Raise UsageError where `ranks` with `ratio` send more than the gradient."""
    if ratio * ranks >= 1:
        raise UsageError(
            f"[wire] compression_ratio: with {ranks} ranks expected less than 1/{ranks}, seen "
            f"{ratio}: index and value of each element, from each rank, would be more than "
            "the gradient; lower it, or take compression = 'none'"
        )


class TopK:
    """Sums the largest elements of each rank."""

    def __init__(self, allreduce: AllReduceFunction, arena: Arena, ratio: float, ranks: int):
        """Send `ratio` of each matrix of `arena`, at least one element of it."""
        must_send_less(ratio, ranks)
        if arena.grad.size > np.iinfo(INDEX).max:
            raise UsageError(
                "[wire] compression: top-k counts elements in 32 bits; expected fewer than "
                f"{np.iinfo(INDEX).max} of them, seen {arena.grad.size}; take 'powersgd'"
            )
        self._residual = namespace(arena.grad).zeros_like(arena.grad)
        self._largest: dict[int, Largest] = {}  # of each bucket, on a device
        self.own = {"residual": self._residual}
        self.shared: dict[str, np.ndarray] = {}
        self._allreduce, self._ratio, self._scratch = allreduce, ratio, Scratch()
        self._slots_cache = BucketSlotsCache(arena, lambda slot: True)

    def __call__(self, group: Group, x: Array) -> None:
        """Sum flat `x`, a slice of the gradient plane, in place."""
        bucket = self._slots_cache.find(x)
        packed = bucket.pack(x)
        if packed.size:
            self._allreduce(group, packed, np.add)
        if bucket.matrices:
            counts = [ceil(self._ratio * slot.size) for slot in bucket.matrices]
            rows = self._rows_for(group, x, sum(counts))
            local = _pairs(rows[group.link.rank], sum(counts), x.dtype)
            (self._select_on_device if on_device(x) else self._select)(bucket, counts, x, *local)
            all_gather(group, rows.reshape(-1))
            x[...] = 0
            for row in rows:
                add(x, *_pairs(row, sum(counts), x.dtype))
        bucket.unpack(packed, x)

    def _select(
        self, bucket: BucketSlots, counts: list[int], x: Array, indices: Array, values: Array
    ) -> None:
        """Write the indices and values that this rank sends; the rest becomes its residual."""
        for slot, part, k in zip(bucket.matrices, slices(counts), counts, strict=True):
            grad, residual = bucket.of(x, slot), self._residual[slot.offset : slot.stop]
            residual += grad
            largest = _largest(residual, k)
            indices[part], values[part] = (
                largest + (slot.offset - bucket.start),
                residual[largest],
            )
            residual[largest] = 0

    def _select_on_device(
        self, bucket: BucketSlots, counts: list[int], x: Array, indices: Array, values: Array
    ) -> None:
        """As `_select`, in a few kernels."""
        if bucket.start not in self._largest:
            matrices = [(s.offset, s.size, k) for s, k in zip(bucket.matrices, counts, strict=True)]
            self._largest[bucket.start] = Largest(self._residual, bucket.start, matrices)
        self._largest[bucket.start](x, indices, values)

    def _rows_for(self, group: Group, x: Array, count: int) -> Array:
        """Return a buffer for the `count` pairs of every rank, one row of bytes per rank."""
        nbytes = -(-count * (INDEX.itemsize + x.itemsize) // ROW_BYTES) * ROW_BYTES
        return self._scratch.on_device_of(x, group.link.size * nbytes, np.uint8).reshape(-1, nbytes)


def _largest(x: np.ndarray, k: int) -> np.ndarray:
    """Return the indices of the `k` largest magnitudes of flat `x`, of equal ones the first."""
    # As integers magnitudes keep their order and compare faster. NaN counts as largest: it is
    # sent, and so reaches all ranks.
    bits = abs(x).view(f"u{x.itemsize}")
    threshold = np.partition(bits, -k)[-k]
    above = np.flatnonzero(bits > threshold)
    return np.concatenate([above, np.flatnonzero(bits == threshold)[: k - len(above)]])


def add(x: Array, indices: Array, values: Array) -> None:
    """Add `values` to flat `x` at `indices`, each index at most once."""
    if on_device(x):
        add_pairs(x, indices, values)
    else:
        x[indices] += values


def _pairs(row: Array, count: int, dtype: np.dtype) -> tuple[Array, Array]:
    """Return `count` indices and as many values in a row: views."""
    # Values first: they may be of 8 bytes, and begin where the row does.
    middle, end = (count * n for n in (dtype.itemsize, dtype.itemsize + INDEX.itemsize))
    return row[middle:end].view(INDEX), row[:middle].view(dtype)
