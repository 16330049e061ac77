"""Top-k: the largest elements of each matrix are sent, the others stay in a residual.

Rank i has gradient g_i and residual e_i, at first zero. For each matrix:

    a_i = g_i + e_i
    s_i = a_i where |a_i| is among its k largest, else 0          e_i <- a_i - s_i
    g   = s_1 + ... + s_P                                         in the order of ranks

so that the sum of the updates is the sum of the gradients minus the current residuals. Each rank
sends (index, value) pairs, k per matrix, and an all-gather returns the pairs of every rank:

    rank 0   [7 0.3|2 -.9]                 [7 0.3|2 -.9|2 0.5|4 0.1|...]
    rank 1   [2 0.5|4 0.1]    all-gather   the same
    ...

Cost: P-1 steps, 8 k (P-1) bytes sent per rank for float32. This grows with P, unlike the
8 n (P-1)/P bytes of a ring all-reduce: it is less than half as much only for k/n < 1/(2P). A ratio
of 1/P or more is refused. Vectors are summed uncompressed, by the all-reduce.

Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", 2018, who prove the convergence
rate of SGD; Lin et al., "Deep gradient compression", 2018, who also keep momentum on each rank and
warm up the ratio. Here the optimizer applies momentum to the sum.

A rank without a gradient of a matrix sends marks as values and keeps its residual, so that the sum
is marked where no rank has a gradient; see optim/absent.py.

On a GPU the kernels of top_k_cuda.py select the largest elements; pairs stay in its memory.
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
from hpctrain.gradients.compress.bucket_slots import (
    BucketSlots,
    BucketSlotsCache,
    consecutive_slices,
)
from hpctrain.gradients.compress.top_k_cuda import LargestSelector, add_pairs
from hpctrain.optim.absent import ABSENT, is_absent

INDEX_DTYPE = np.dtype(np.uint32)
ROW_BYTES = 8  #: messages are padded to multiples of this, the alignment that GPU kernels need


def require_smaller_message(ratio: float, ranks: int) -> None:
    """Raise UsageError if `ranks` ranks with `ratio` would send more than the whole gradient."""
    if ratio * ranks >= 1:
        raise UsageError(
            f"[wire] compression_ratio: with {ranks} ranks expected less than 1/{ranks}, seen "
            f"{ratio}: the indices and values of all ranks would need more bytes than "
            "the gradient; lower the ratio, or use compression = 'none'"
        )


class TopK:
    """Sums the largest gradient elements of each rank."""

    def __init__(
        self,
        allreduce: AllReduceFunction,
        arena: Arena,
        ratio: float,
        ranks: int,
        has_marks: bool,
    ):
        """Send a fraction `ratio` of each matrix of `arena`, at least one element."""
        require_smaller_message(ratio, ranks)
        if arena.grad.size > np.iinfo(INDEX_DTYPE).max:
            raise UsageError(
                "[wire] compression: top-k has indices of 32 bits; expected fewer than "
                f"{np.iinfo(INDEX_DTYPE).max} elements, seen {arena.grad.size}; use 'powersgd'"
            )
        self._residual = namespace(arena.grad).zeros_like(arena.grad)
        self._selectors: dict[int, LargestSelector] = {}  # of each bucket, on a device
        self.local_state = {"residual": self._residual}
        self.shared_state: dict[str, np.ndarray] = {}
        self._allreduce, self._ratio, self._scratch = allreduce, ratio, Scratch()
        self._slots_cache = BucketSlotsCache(arena, lambda slot: True, has_marks)

    def __call__(self, group: Group, x: Array) -> None:
        """Sum flat `x`, a slice of the gradient plane, in place."""
        bucket = self._slots_cache.find(x)
        packed_slots = bucket.pack(x)
        if packed_slots.size:
            self._allreduce(group, packed_slots, np.add)
        if bucket.matrices:
            counts = [ceil(self._ratio * slot.size) for slot in bucket.matrices]
            pair_bytes = INDEX_DTYPE.itemsize + x.itemsize
            row_bytes = -(-sum(counts) * pair_bytes // ROW_BYTES) * ROW_BYTES  # one row per rank
            rows = self._scratch.buffer(x, group.link.size * row_bytes, np.uint8)
            rows = rows.reshape(-1, row_bytes)
            pairs = [_view_pairs(row, sum(counts), x.dtype) for row in rows]
            indices, values = pairs[group.link.rank]
            parts, absent = list(consecutive_slices(counts)), bucket.find_absent(x)
            absent_slots = [bucket.matrices[i] for i in absent]
            saved_residuals = [
                self._residual[slot.offset : slot.stop].copy() for slot in absent_slots
            ]
            select = self._select_pairs_on_device if on_device(x) else self._select_pairs
            select(bucket, counts, x, indices, values)
            bucket.mark_absent(values, parts, absent)
            for slot, residual in zip(absent_slots, saved_residuals, strict=True):
                self._residual[slot.offset : slot.stop] = residual
            all_gather(group, rows.reshape(-1))
            x[...] = 0
            for indices, values in pairs:
                add_at(x, indices, values)
            for i, slot in zip(absent, absent_slots, strict=True):
                if all(is_absent(values[parts[i]]) for _, values in pairs):
                    bucket.view_slot(x, slot)[...] = ABSENT
        bucket.unpack(packed_slots, x)

    def _select_pairs(
        self, bucket: BucketSlots, counts: list[int], x: Array, indices: Array, values: Array
    ) -> None:
        """Write the indices and values that this rank sends; the rest remains in the residual."""
        for slot, part, k in zip(bucket.matrices, consecutive_slices(counts), counts, strict=True):
            grad, residual = bucket.view_slot(x, slot), self._residual[slot.offset : slot.stop]
            residual += grad
            largest_indices = _largest_indices(residual, k)
            indices[part], values[part] = (
                largest_indices + (slot.offset - bucket.start),
                residual[largest_indices],
            )
            residual[largest_indices] = 0

    def _select_pairs_on_device(
        self, bucket: BucketSlots, counts: list[int], x: Array, indices: Array, values: Array
    ) -> None:
        """Do the work of `_select_pairs` in a few kernels."""
        if bucket.start not in self._selectors:
            matrices = [(s.offset, s.size, k) for s, k in zip(bucket.matrices, counts, strict=True)]
            self._selectors[bucket.start] = LargestSelector(self._residual, bucket.start, matrices)
        self._selectors[bucket.start](x, indices, values)


def _largest_indices(x: np.ndarray, k: int) -> np.ndarray:
    """Return the indices of the `k` largest magnitudes of flat `x`; among equals, the first."""
    # The bits of magnitudes, read as integers, have the same order and compare faster. NaN is the
    # largest, so it is sent to all ranks.
    bits = abs(x).view(f"u{x.itemsize}")
    threshold = np.partition(bits, -k)[-k]
    above_threshold = np.flatnonzero(bits > threshold)
    at_threshold = np.flatnonzero(bits == threshold)
    return np.concatenate([above_threshold, at_threshold[: k - len(above_threshold)]])


def add_at(x: Array, indices: Array, values: Array) -> None:
    """Add `values` to flat `x` at `indices`, each index at most once."""
    if on_device(x):
        add_pairs(x, indices, values)
    else:
        x[indices] += values


def _view_pairs(row: Array, count: int, dtype: np.dtype) -> tuple[Array, Array]:
    """Return views of `count` indices and `count` values in a row of bytes."""
    # Values come first, because values of 8 bytes need the alignment of the row.
    values_end = count * dtype.itemsize
    indices_end = values_end + count * INDEX_DTYPE.itemsize
    return row[values_end:indices_end].view(INDEX_DTYPE), row[:values_end].view(dtype)
