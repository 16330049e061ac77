"""Halving-doubling: the bytes of a ring in the steps of a tree.

Reduce-scatter by recursive halving, then all-gather by recursive doubling, the same way back.
Four ranks; a rank's *range* is the part of the vector for which it is responsible:

    rank    start     halve with r^2   halve with r^1   double with r^1   double with r^2
     0     [abcd]       [ab] 2 cd        [a] 4  bcd        [ab] 4             [abcd] 4
     1     [abcd]       [ab] 2 cd        [b] 4  acd        [ab] 4             [abcd] 4
     2     [abcd]       [cd] 2 ab        [c] 4  abd        [cd] 4             [abcd] 4
     3     [abcd]       [cd] 2 ab        [d] 4  abc        [cd] 4             [abcd] 4

Index rule: with distance d = Q/2, Q/4, ..., 1 the partner is r xor d; both have the same range of
chunks; the rank whose bit d is clear keeps the lower half, sends the upper, adds the received one.

If P is no power of two, let Q be the largest one below it. Ranks Q.. are folded: each adds its
vector into rank r - Q, halves first so that both add one half, and receives the result at the end.

Cost for P = 2^k: 2 log2 P steps, 2n(P-1)/P bytes sent per rank, n(P-1)/P added. Folding: three
more steps and up to 2n more bytes. All travels in segments, so the scratch is one segment.
One order of additions per chunk, then copies: all ranks end with the same bytes.

Source: Rabenseifner, "Optimization of collective reduction operations", 2004.
"""

from __future__ import annotations

import numpy as np

from hpctrain.collectives.chunks import bounds, segments
from hpctrain.collectives.group import Group
from hpctrain.collectives.reductions.operations import Operation
from hpctrain.transport.link import Link


def halving_doubling(group: Group, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place over all ranks of `group`."""
    rank, size = group.link.rank, group.link.size
    core = 1 << (size.bit_length() - 1)
    if rank >= core:
        _hand_over(group, x, op, rank - core)
        return
    folded_rank = rank + core if rank + core < size else None
    if folded_rank is not None:
        _take_over(group, x, op, folded_rank)
    _halve_and_double(group, x, op, core)
    if folded_rank is not None:
        group.link.isend(x, folded_rank).wait()


def _halve_and_double(group: Group, x: np.ndarray, op: Operation, core: int) -> None:
    link, offsets = group.link, bounds(x.size, core)
    first, last = 0, core  # range of chunks
    exchanges: list[tuple[int, slice, slice]] = []
    distance = core // 2
    while distance:
        middle = (first + last) // 2
        lower, upper = slice(offsets[first], offsets[middle]), slice(offsets[middle], offsets[last])
        partner = link.rank ^ distance
        keep, give = (upper, lower) if link.rank & distance else (lower, upper)
        _exchange_and_add(group, x[give], x[keep], op, partner)
        first, last = (middle, last) if link.rank & distance else (first, middle)
        exchanges.append((partner, keep, give))
        distance //= 2
    for partner, keep, give in reversed(exchanges):
        _exchange(link, x[keep], x[give], partner)


def _exchange(link: Link, outgoing: np.ndarray, incoming: np.ndarray, partner: int) -> None:
    """Exchange both in segments: uncut, one direction would wait for the other."""
    receives = [link.irecv(segment, partner) for segment in segments(incoming)]
    sends = [link.isend(segment, partner) for segment in segments(outgoing)]
    for request in (*receives, *sends):
        request.wait()


def _exchange_and_add(
    group: Group, give: np.ndarray, keep: np.ndarray, op: Operation, partner: int
) -> None:
    """Send `give` and add the received half to `keep`; halves may differ by an element."""
    sends = [group.link.isend(segment, partner) for segment in segments(give)]
    for segment in segments(keep):
        inbox = group.scratch.like(segment)
        group.link.irecv(inbox, partner).wait()
        op(segment, inbox, out=segment)
    for send in sends:
        send.wait()


def _take_over(group: Group, x: np.ndarray, op: Operation, folded_rank: int) -> None:
    """Add the vector of `folded_rank`: this rank adds the lower half, that rank the upper."""
    lower, upper = x[: x.size // 2], x[x.size // 2 :]
    _exchange_and_add(group, upper, lower, op, folded_rank)
    group.link.irecv(upper, folded_rank).wait()


def _hand_over(group: Group, x: np.ndarray, op: Operation, partner: int) -> None:
    """Fold into `partner`, and receive the result."""
    lower, upper = x[: x.size // 2], x[x.size // 2 :]
    _exchange_and_add(group, lower, upper, op, partner)
    group.link.isend(upper, partner).wait()
    group.link.irecv(x, partner).wait()
