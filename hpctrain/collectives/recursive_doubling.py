"""Recursive doubling: whole vectors, exchanged with partners at distance 1, 2, 4, ...

Four ranks, each holding its own vector; after step k all ranks of a group of 2^(k+1) agree:

    rank   start   step 0 (xor 1)   step 1 (xor 2)
     0       a          ab               abcd
     1       b          ab               abcd
     2       c          cd               abcd
     3       d          cd               abcd

Index rule: at step k the partner is r xor 2^k. If P is no power of two, let Q be the largest
one below P: ranks Q.. first send their vectors to ranks 0.., which add them, exchange as above and
send the result back (folding).

Cost: ceil(log2 P) steps, n bytes sent and added in each; folding adds two steps. No algorithm has
fewer steps, so this one suits short vectors. A vector travels in segments, so the scratch is one
segment. On both partners the lower rank's vector is the first operand, and receives the result: so
both hold the same bytes after every step. (Addition commutes except for the bits of a NaN, and
NumPy may round otherwise where the result replaces the second operand.)

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", 2005.
"""

from __future__ import annotations

import numpy as np

from hpctrain.collectives.chunks import segments
from hpctrain.collectives.group import Group
from hpctrain.collectives.reductions.operations import Operation


def recursive_doubling(group: Group, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place over all ranks of `group`."""
    rank, size = group.link.rank, group.link.size
    core_size = 1 << (size.bit_length() - 1)
    if rank >= core_size:
        return _fold_into(group, x, rank - core_size)
    folded_rank = rank + core_size if rank + core_size < size else None
    for segment in segments(x):
        _reduce_segment(group, segment, op, core_size, folded_rank)


def _reduce_segment(
    group: Group, segment: np.ndarray, op: Operation, core_size: int, folded_rank: int | None
) -> None:
    link, total, inbox = group.link, segment, group.scratch.buffer_like(segment)
    if folded_rank is not None:
        link.irecv(inbox, folded_rank).wait()
        op(total, inbox, out=total)
    distance = 1
    while distance < core_size:
        partner = link.rank ^ distance
        link.sendrecv(total, partner, inbox, partner)
        if partner < link.rank:
            total, inbox = inbox, total
        op(total, inbox, out=total)
        distance *= 2
    if total is not segment:
        segment[...] = total
    if folded_rank is not None:
        link.isend(segment, folded_rank).wait()


def _fold_into(group: Group, x: np.ndarray, partner: int) -> None:
    """Send this rank's vector to `partner` and receive the result from it."""
    for segment in segments(x):
        group.link.isend(segment, partner).wait()
        group.link.irecv(segment, partner).wait()
