"""Halving-doubling: the bytes of a ring in the steps of a tree.

Reduce-scatter by recursive halving, then all-gather by recursive doubling, with the same partners.
Four ranks; a rank's *range* is the part of the vector for which it is responsible:

    rank    start     halve with r^2   halve with r^1   double with r^1   double with r^2
     0     [abcd]       [ab] 2 cd        [a] 4  bcd        [ab] 4             [abcd] 4
     1     [abcd]       [ab] 2 cd        [b] 4  acd        [ab] 4             [abcd] 4
     2     [abcd]       [cd] 2 ab        [c] 4  abd        [cd] 4             [abcd] 4
     3     [abcd]       [cd] 2 ab        [d] 4  abc        [cd] 4             [abcd] 4

Index rule: with distance d = Q/2, Q/4, ..., 1 the partner is r xor d; both have the same range of
chunks; the rank whose bit d is clear keeps the lower half, sends the upper, adds the received one.

If P is no power of two, let Q be the largest one below P. Ranks Q.. are folded: rank r adds its
vector to rank r - Q's, each of the two adding one half, and receives the result at the end.

Cost for P = 2^k: 2 log2 P steps, 2n(P-1)/P bytes sent per rank, n(P-1)/P added. Folding: three
more steps and up to 2n more bytes. Vectors travel in segments, so the scratch is one segment.
Each chunk is summed in one order and then copied: all ranks end with the same bytes.

Source: Rabenseifner, "Optimization of collective reduction operations", 2004.
"""

from __future__ import annotations

import numpy as np

from hpctrain.collectives.chunks import bounds, segments
from hpctrain.collectives.group import Group
from hpctrain.collectives.reductions.operations import Operation
from hpctrain.transport.link import Link, wait_all


def halving_doubling(group: Group, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place over all ranks of `group`."""
    rank, size = group.link.rank, group.link.size
    core_size = 1 << (size.bit_length() - 1)
    if rank >= core_size:
        _fold_into(group, x, op, rank - core_size)
        return
    folded_rank = rank + core_size if rank + core_size < size else None
    if folded_rank is not None:
        # This rank adds the lower half, that rank the upper.
        lower, upper = x[: x.size // 2], x[x.size // 2 :]
        _exchange_and_add(group, upper, lower, op, folded_rank)
        group.link.irecv(upper, folded_rank).wait()
    _halve_and_double(group, x, op, core_size)
    if folded_rank is not None:
        group.link.isend(x, folded_rank).wait()


def _halve_and_double(group: Group, x: np.ndarray, op: Operation, core_size: int) -> None:
    link, offsets = group.link, bounds(x.size, core_size)
    first, last = 0, core_size  # range of chunks
    exchanges: list[tuple[int, slice, slice]] = []
    distance = core_size // 2
    while distance:
        middle = (first + last) // 2
        lower, upper = slice(offsets[first], offsets[middle]), slice(offsets[middle], offsets[last])
        partner = link.rank ^ distance
        kept_range, sent_range = (upper, lower) if link.rank & distance else (lower, upper)
        _exchange_and_add(group, x[sent_range], x[kept_range], op, partner)
        first, last = (middle, last) if link.rank & distance else (first, middle)
        exchanges.append((partner, kept_range, sent_range))
        distance //= 2
    for partner, kept_range, sent_range in reversed(exchanges):
        _exchange(link, x[kept_range], x[sent_range], partner)


def _exchange(link: Link, outgoing: np.ndarray, incoming: np.ndarray, partner: int) -> None:
    """Exchange in segments: as one message each, one direction would wait for the other."""
    receives = [link.irecv(segment, partner) for segment in segments(incoming)]
    sends = [link.isend(segment, partner) for segment in segments(outgoing)]
    wait_all((*receives, *sends))


def _exchange_and_add(
    group: Group, sent_half: np.ndarray, kept_half: np.ndarray, op: Operation, partner: int
) -> None:
    """Send `sent_half`, add the received half to `kept_half`; they may differ by an element."""
    sends = [group.link.isend(segment, partner) for segment in segments(sent_half)]
    for segment in segments(kept_half):
        inbox = group.scratch.buffer_like(segment)
        group.link.irecv(inbox, partner).wait()
        op(segment, inbox, out=segment)
    wait_all(sends)


def _fold_into(group: Group, x: np.ndarray, op: Operation, partner: int) -> None:
    """Add this rank's vector to the `partner`'s, and receive the result."""
    lower, upper = x[: x.size // 2], x[x.size // 2 :]
    _exchange_and_add(group, lower, upper, op, partner)
    group.link.isend(upper, partner).wait()
    group.link.irecv(x, partner).wait()
