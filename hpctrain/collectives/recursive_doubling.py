"""Recursive doubling: whole vectors, exchanged with partners at distance 1, 2, 4, ...

Four ranks, each holding its own vector; after step k all ranks of a group of 2^(k+1) agree:

    rank   start   step 0 (xor 1)   step 1 (xor 2)
     0       a          ab               abcd
     1       b          ab               abcd
     2       c          cd               abcd
     3       d          cd               abcd

Index rule: at step k the partner is r xor 2^k. If P is no power of two, let Q be the largest
one below it: ranks Q.. first add their vectors into ranks 0.., which exchange as above, and
receive the result in the end (folding).

Cost: ceil(log2 P) steps, n bytes sent and added at each; folding adds two steps. The fewest
steps there are: right for short vectors. A vector travels in segments, so the scratch is one
segment. Of two partners the lower one's vector is the first operand on both, and holds the result:
both do the same, and hold the same bytes after every step. (Addition commutes but for the bits of
a NaN; and NumPy adds one element in another way where the result replaces the second operand.)

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
    core = 1 << (size.bit_length() - 1)
    if rank >= core:
        return _fold(group, x, rank - core)
    folded_rank = rank + core if rank + core < size else None
    for segment in segments(x):
        _reduce_segment(group, segment, op, core, folded_rank)


def _reduce_segment(
    group: Group, segment: np.ndarray, op: Operation, core: int, folded_rank: int | None
) -> None:
    link, own, inbox = group.link, segment, group.scratch.like(segment)
    if folded_rank is not None:
        link.irecv(inbox, folded_rank).wait()
        op(own, inbox, out=own)
    distance = 1
    while distance < core:
        partner = link.rank ^ distance
        link.sendrecv(own, partner, inbox, partner)
        if partner < link.rank:
            own, inbox = inbox, own
        op(own, inbox, out=own)
        distance *= 2
    if own is not segment:
        segment[...] = own
    if folded_rank is not None:
        link.isend(segment, folded_rank).wait()


def _fold(group: Group, x: np.ndarray, partner: int) -> None:
    """Send this rank's vector to `partner` and receive the result from it."""
    for segment in segments(x):
        group.link.isend(segment, partner).wait()
        group.link.irecv(segment, partner).wait()
