"""Binomial trees: reduce to a root, broadcast from a root, and both as an all-reduce.

Eight ranks, root 0; the number on an edge is the bit in which child and parent differ:

            0                reduce: a leaf sends at once; a parent adds its children, smallest
          / | \\              bit first, and sends the sum up. broadcast: the same edges, down.
        1/ 2| 4\\
        1   2   4            Index rule (ranks counted from the root): the parent of r is r
            |1  | \\2         without its lowest set bit; its children are r + b for every
            3   5  6         power of two b below that bit, as long as r + b < P.
                   |1
                   7

A vector travels in segments, so the scratch is one segment and a parent adds segment k while
its children send k + 1. Cost of the all-reduce: a depth of 2 ceil(log2 P) steps; a rank sends its
vector once up and once to each child: 2n(P-1)/P bytes on average, n ceil(log2 P) at the root.
All ranks receive the root's sum: the same bytes.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", 2005.
"""

from __future__ import annotations

import numpy as np

from hpctrain.collectives.chunks import segments
from hpctrain.collectives.group import Group
from hpctrain.collectives.reductions.operations import Operation
from hpctrain.collectives.small_messages import LENGTH, SHORT, make_head, reduce_to_maximum
from hpctrain.transport.link import Link, wait_all


def tree(group: Group, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place over all ranks of `group`."""
    reduce(group, x, op)
    broadcast(group, x)


def reduce(group: Group, x: np.ndarray, op: Operation, root: int = 0) -> None:
    """Reduce flat `x` in place to `root`; on other ranks `x` ends with partial results."""
    link = group.link
    parent, children = family(link.rank, link.size, root)
    for segment in segments(x):
        for child in children:
            inbox = group.scratch.buffer_like(segment)
            link.irecv(inbox, child).wait()
            op(segment, inbox, out=segment)
        if parent is not None:
            link.isend(segment, parent).wait()


def broadcast(group: Group, x: np.ndarray, root: int = 0) -> None:
    """Copy `root`'s flat `x` into every rank's `x`; as many steps as the tree is deep."""
    link = group.link
    parent, children = family(link.rank, link.size, root)
    for segment in segments(x):
        if parent is not None:
            link.irecv(segment, parent).wait()
        # The farthest child roots the largest subtree: it goes first.
        wait_all([link.isend(segment, child) for child in reversed(children)])


def broadcast_bytes(link: Link, payload: bytes, root: int = 0) -> bytes:
    """Return the `payload` of rank `root`; payloads from other ranks are ignored.

    A rank sends LENGTH + SHORT bytes to each child: the root has ceil(log2 P) children, a rank
    (P - 1)/P on average. A payload with more than SHORT bytes follows in separate messages.
    """
    head = make_head(payload)
    broadcast(Group(link), head, root)
    length = int(head[:LENGTH].view(np.int64)[0])
    if length <= SHORT:
        return head[LENGTH : LENGTH + length].tobytes()
    data = np.frombuffer(payload, np.uint8) if link.rank == root else np.empty(length, np.uint8)
    broadcast(Group(link), data, root)
    return data.tobytes()


def broadcast_first(link: Link, payload: bytes | None, limit: int) -> dict[int, bytes]:
    """Broadcast from the first `limit` ranks that give a payload; return payloads by rank.

    Before each broadcast the ranks vote on its root, and if ranks with a payload are fewer than
    `limit`, once more: ceil(log2 P) messages of 8 bytes per rank and vote.
    """
    payloads: dict[int, bytes] = {}
    while len(payloads) < limit:
        is_next = payload is not None and link.rank not in payloads
        ranks_behind = np.array([link.size - link.rank if is_next else 0])
        reduce_to_maximum(link, ranks_behind)
        if not ranks_behind[0]:
            break
        root = link.size - int(ranks_behind[0])
        payloads[root] = broadcast_bytes(link, payload or b"", root)
    return payloads


def family(rank: int, size: int, root: int) -> tuple[int | None, list[int]]:
    """Return parent (None at the root) and children, nearest first, of `rank` in the tree."""
    relative_rank = (rank - root) % size
    lowest_bit = relative_rank & -relative_rank if relative_rank else 1 << (size - 1).bit_length()
    bits = [1 << i for i in range(lowest_bit.bit_length() - 1)]
    children = [(relative_rank + bit + root) % size for bit in bits if relative_rank + bit < size]
    return (None if relative_rank == 0 else (relative_rank - lowest_bit + root) % size), children
