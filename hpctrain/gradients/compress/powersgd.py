"""PowerSGD: each matrix as a product of two thin matrices, from one step of power iteration.

Rank i has gradient G_i (n x m) and residual E_i, at first zero; all ranks hold the same Q (m x r):

    M_i = G_i + E_i
    P   = M_1 Q + ... + M_P Q                  an all-reduce of n r elements
    P   <- orthonormal columns of P            the same on all ranks
    Q_i = M_i^T P                              E_i <- M_i - P Q_i^T
    Q   = Q_1 + ... + Q_P                      an all-reduce of m r elements
    G   = P Q^T                                Q is kept for the next step: a warm start

The sum of G over the steps is the sum of the gradients minus the current residuals. Gradients
of successive steps are similar, so one multiplication per step approximates the largest directions.

    rank 0   M ======   M Q |   all-reduce |   M^T P ---   all-reduce ---   P Q^T ======
               ======       |              |                                      ======

A rank without a gradient of a matrix marks M Q. Where the sum P is marked, no rank has a gradient:
residuals and Q stay, and the sum of the matrix is marked; see optim/absent.py.

Cost: two all-reduces, of (n + m) r elements together, instead of n m. Tensors of more than two dims
are reshaped to the matrix with the least n + m. Vectors are sent uncompressed with P, and so are
matrices for which (n + m) r is not less than n m. Time: about 8 n m r operations per rank.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for
distributed optimization", 2019. P and Q are computed by BLAS and LAPACK, on a GPU by cuBLAS and
orthonormal.py. Ranks hold the same bytes only if they have the same versions of these libraries,
and the same type of CPU or GPU.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from hpctrain.collectives import AllReduceFunction, Group
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, like, namespace
from hpctrain.gradients.arena import Arena, Slot
from hpctrain.gradients.compress.bucket_slots import (
    BucketSlots,
    BucketSlotsCache,
    consecutive_slices,
)
from hpctrain.gradients.compress.orthonormal import Orthonormalizer
from hpctrain.optim.absent import ABSENT, is_absent


class _Matrix(NamedTuple):
    """A matrix of n rows and m columns, and its factors; all are views."""

    m: Array  # (n, m): gradient + residual, later the new residual
    p: Array  # (n, r)
    q: Array  # (m, r)
    out: Array  # (n, m): the sum


class PowerSgd:
    """Sums gradients as matrices of low rank."""

    def __init__(self, allreduce: AllReduceFunction, arena: Arena, rank: int, has_marks: bool):
        """Send each matrix of `arena` as the product of matrices of rank `rank`.

        Raises UsageError for an arena that holds a part of a model: Q is drawn for every slot.
        """
        if arena.share is not None:
            raise UsageError(
                "[wire] compression: 'powersgd' is not yet available where ranks hold parts of a "
                "model; expected another method, such as 'top-k', or 'none'"
            )
        self._allreduce, self._rank = allreduce, rank
        self._slots_cache = BucketSlotsCache(arena, self._is_compressed, has_marks)
        self._residual = namespace(arena.grad).zeros_like(arena.grad)
        matrices = [s for s in arena.slots if len(s.shape) > 1 and self._is_compressed(s)]
        q_slices = consecutive_slices(fold_shape(slot.shape)[1] * rank for slot in matrices)
        self._q_slices = {slot.name: part for slot, part in zip(matrices, q_slices, strict=True)}
        # The initial Q is a function of the layout, hence the same on all ranks.
        q = np.random.default_rng(0).standard_normal(q_slices[-1].stop if q_slices else 0)
        self._q = like(arena.grad, q)
        self._orthonormalizers: dict[int, Orthonormalizer] = {}  # of each bucket
        self.local_state = {"residual": self._residual}
        self.shared_state = {"powersgd_q": self._q}

    def __call__(self, group: Group, x: Array) -> None:
        """Sum flat `x`, a slice of the gradient plane, in place."""
        bucket, xp = self._slots_cache.find(x), namespace(x)
        rows = [fold_shape(slot.shape)[0] for slot in bucket.matrices]
        p_sizes = [n * self._rank for n in rows]
        packed_slots = bucket.pack(x, sum(p_sizes))
        stacked_p = packed_slots[packed_slots.size - sum(p_sizes) :]
        parts, absent = list(consecutive_slices(p_sizes)), bucket.find_absent(x)
        matrices = self._add_to_residuals(bucket, x, [stacked_p[part] for part in parts])
        for m, p, q, _ in matrices:
            xp.matmul(m, q, out=p)
        bucket.mark_absent(stacked_p, parts, absent)
        if packed_slots.size:
            self._allreduce(group, packed_slots, np.add)
        bucket.unpack(packed_slots, x)
        absent = [i for i in absent if is_absent(stacked_p[parts[i]])]  # on all ranks
        saved_factors = [(matrices[i], matrices[i].q.copy()) for i in absent]
        matrices = [matrix for i, matrix in enumerate(matrices) if i not in absent]
        if bucket.start not in self._orthonormalizers:
            self._orthonormalizers[bucket.start] = Orthonormalizer(x, self._rank, rows)
        self._orthonormalizers[bucket.start](stacked_p)
        for m, p, q, _ in matrices:
            xp.matmul(m.T, p, out=q)
            m -= p @ q.T
        if bucket.matrices:
            first, last = bucket.matrices[0].name, bucket.matrices[-1].name
            # One slice holds Q of the bucket's matrices, since Q has the order of slots.
            bucket_q = self._q[self._q_slices[first].start : self._q_slices[last].stop]
            self._allreduce(group, bucket_q, np.add)
        for _, p, q, out in matrices:
            xp.matmul(p, q.T, out=out)
        for matrix, q in saved_factors:
            matrix.q[...] = q
            matrix.out[...] = ABSENT

    def _add_to_residuals(self, bucket: BucketSlots, x: Array, p: list[Array]) -> list[_Matrix]:
        """Add the gradient of bucket `x` to the residual; return the matrices with factors `p`."""
        matrices = []
        for slot, p_part in zip(bucket.matrices, p, strict=True):
            out = bucket.view_slot(x, slot).reshape(fold_shape(slot.shape))
            residual = self._residual[slot.offset : slot.stop].reshape(out.shape)
            residual += out
            q = self._q[self._q_slices[slot.name]].reshape(-1, self._rank)
            matrices.append(_Matrix(residual, p_part.reshape(-1, self._rank), q, out))
        return matrices

    def _is_compressed(self, slot: Slot) -> bool:
        n, m = fold_shape(slot.shape)
        return self._rank <= min(n, m) and (n + m) * self._rank < n * m


def fold_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, columns) of a tensor reshaped to a matrix, with the least rows + columns."""
    foldings = ((prod(shape[:i]), prod(shape[i:])) for i in range(1, len(shape)))
    return min(foldings, key=sum)
