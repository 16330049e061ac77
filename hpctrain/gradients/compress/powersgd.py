"""PowerSGD: each matrix as a product of two thin ones, from one step of power iteration.

Rank i has gradient G_i (n x m) and residual E_i, at first zero; all ranks hold the same Q (m x r):

    M_i = G_i + E_i
    P   = M_1 Q + ... + M_P Q                  an all-reduce of n r elements
    P   <- orthonormal columns of P            the same on all ranks
    Q_i = M_i^T P                              E_i <- M_i - P Q_i^T
    Q   = Q_1 + ... + Q_P                      an all-reduce of m r elements
    G   = P Q^T                                kept as Q for the next step, too: a warm start

The sum of all G is the sum of all gradients less the present residuals. Gradients of successive
steps resemble each other, so one multiplication per step follows the largest directions.

    rank 0   M ======   M Q |   all-reduce |   M^T P ---   all-reduce ---   P Q^T ======
               ======       |              |                                      ======

Cost: two all-reduces, of (n + m) r elements in all, in place of n m. Tensors of more than two dims
are folded where n + m is least. Vectors are sent uncompressed with P; so is a matrix for which
(n + m) r is no less than n m. Time: about 8 n m r operations per rank.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for
distributed optimization", 2019. P and Q are made by BLAS and LAPACK, on a GPU by cuBLAS and
orthonormal.py: that all ranks hold the same bytes needs the same of these, and the same kind of
cores or GPUs, on all ranks.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from hpctrain.collectives import AllReduceFunction, Group
from hpctrain.core.xp import Array, like, namespace
from hpctrain.gradients.arena import Arena, Slot
from hpctrain.gradients.compress.bucket_slots import BucketSlots, BucketSlotsCache, slices
from hpctrain.gradients.compress.orthonormal import Orthonormal


class _Matrix(NamedTuple):
    """A matrix of n rows and m columns, and its factors; all are views."""

    m: Array  # (n, m): gradient and residual, then the residual
    p: Array  # (n, r)
    q: Array  # (m, r)
    out: Array  # (n, m): the sum


class PowerSgd:
    """Sums matrices of low rank."""

    def __init__(self, allreduce: AllReduceFunction, arena: Arena, rank: int):
        """Send each matrix of `arena` as a product of `rank` columns and rows."""
        self._allreduce, self._rank = allreduce, rank
        self._slots_cache = BucketSlotsCache(arena, self._shrinks)
        self._residual = namespace(arena.grad).zeros_like(arena.grad)
        matrices = [s for s in arena.slots if len(s.shape) > 1 and self._shrinks(s)]
        parts = slices(folded(slot.shape)[1] * rank for slot in matrices)
        self._part = {slot.name: part for slot, part in zip(matrices, parts, strict=True)}
        # The start of the iteration is a function of the layout, hence the same on all ranks.
        q = np.random.default_rng(0).standard_normal(parts[-1].stop if parts else 0)
        self._q = like(arena.grad, q)
        self._orthonormal: dict[int, Orthonormal] = {}  # of each bucket
        self.own = {"residual": self._residual}
        self.shared = {"powersgd_q": self._q}

    def __call__(self, group: Group, x: Array) -> None:
        """Sum flat `x`, a slice of the gradient plane, in place."""
        bucket, xp = self._slots_cache.find(x), namespace(x)
        rows = [folded(slot.shape)[0] for slot in bucket.matrices]
        columns = [n * self._rank for n in rows]
        packed = bucket.pack(x, sum(columns))
        tall = packed[packed.size - sum(columns) :]
        matrices = self._matrices(bucket, x, [tall[part] for part in slices(columns)])
        for m, p, q, _ in matrices:
            xp.matmul(m, q, out=p)
        if packed.size:
            self._allreduce(group, packed, np.add)
        bucket.unpack(packed, x)
        if bucket.start not in self._orthonormal:
            self._orthonormal[bucket.start] = Orthonormal(x, self._rank, rows)
        self._orthonormal[bucket.start](tall)
        for m, p, q, _ in matrices:
            xp.matmul(m.T, p, out=q)
            m -= p @ q.T
        if matrices:
            self._allreduce(group, self._rows(bucket), np.add)
        for _, p, q, out in matrices:
            xp.matmul(p, q.T, out=out)

    def _matrices(self, bucket: BucketSlots, x: Array, p: list[Array]) -> list[_Matrix]:
        """Return the matrices of bucket `x`, its gradient added to the residual, and `p`."""
        matrices = []
        for slot, columns in zip(bucket.matrices, p, strict=True):
            out = bucket.of(x, slot).reshape(folded(slot.shape))
            residual = self._residual[slot.offset : slot.stop].reshape(out.shape)
            residual += out
            q = self._q[self._part[slot.name]].reshape(-1, self._rank)
            matrices.append(_Matrix(residual, columns.reshape(-1, self._rank), q, out))
        return matrices

    def _rows(self, bucket: BucketSlots) -> Array:
        """Return Q of all matrices of a bucket: one slice, for both are in the order of slots."""
        first, last = bucket.matrices[0], bucket.matrices[-1]
        return self._q[self._part[first.name].start : self._part[last.name].stop]

    def _shrinks(self, slot: Slot) -> bool:
        n, m = folded(slot.shape)
        return self._rank <= min(n, m) and (n + m) * self._rank < n * m


def folded(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of a tensor seen as a matrix: those with the least sum."""
    cuts = ((prod(shape[:i]), prod(shape[i:])) for i in range(1, len(shape)))
    return min(cuts, key=sum)
