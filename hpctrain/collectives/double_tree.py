"""Double binary tree: two trees, each for half of the vector, so that every rank works in both.

In one binary tree half of the ranks are leaves: they send, but never add or forward. In a second
tree these are the inner ranks. Eight ranks, numbered from 1; in tree 1 odd ranks are leaves, and
mirroring (P + 1 - v; for odd P shifting by one) makes them inner ranks of tree 2:

    tree 1, lower half        8                 tree 2, upper half    1
                            /                                          \\
                          4                                              5
                       /     \\                                        /     \\
                      2       6                                      3       7
                     / \\     / \\                                    / \\     / \\
                    1   3   5   7                                  2   4   6   8

Index rule for tree 1: the root of v..w is the node whose distance from v - 1 is the largest power
of two; left of it lies a complete tree, right of it the same rule again.

Halves travel in segments: a rank receives segment k from its children, adds, and sends it up while
k + 1 is in flight; then the sums come down the same edges. No rank is inner in both trees. A rank
starts with the tree in which it is a leaf, and waits for no rank there. In the other tree it posts
the receives of the next segments before they are needed. Between nodes segments are shorter, so
that ranks deep in the tree start earlier.

Cost: up to 4L + 6k steps of n/2k bytes for k segments of a half, L = ceil(log2 P): about 2n bytes
sent per rank as in a ring, with a latency that grows as log P. Scratch: 2 MiB, the segments whose
receive is posted ahead. The root's sum is copied to all ranks: the same bytes.

Source: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction
and scan", 2009.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hpctrain.collectives.chunks import SEGMENT_BYTES, segments
from hpctrain.collectives.group import Group
from hpctrain.collectives.reductions.operations import Operation
from hpctrain.collectives.ring import RECEIVES_AHEAD
from hpctrain.transport.link import Link, Request, wait_all


class Family(NamedTuple):
    """A rank's neighbours in one tree."""

    parent: int | None
    children: tuple[int, ...]


Half = tuple[list[np.ndarray], Family]  #: its segments, and this rank's neighbours in its tree


def double_tree(group: Group, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place over all ranks of `group`."""
    crosses_nodes = len(group.nodes) > 1
    segment_bytes, receives_ahead = (
        (group.stream_segment_bytes, 2 * RECEIVES_AHEAD)
        if crosses_nodes
        else (SEGMENT_BYTES, RECEIVES_AHEAD)
    )
    inboxes = group.scratch.buffer_rows(x, receives_ahead, segment_bytes)
    halves = [(list(segments(h, segment_bytes)), f) for h, f in _halves_leaf_first(group, x)]
    _reduce(group.link, halves, op, inboxes)
    _broadcast(group.link, halves, receives_ahead)


def _reduce(link: Link, halves: list[Half], op: Operation, inboxes: np.ndarray) -> None:
    sends: list[Request] = []
    for half, family in halves:
        arrivals = [(child, segment) for segment in half for child in family.children]
        received_segments = _receive_segments(link, arrivals, inboxes)
        for segment in half:
            for _, inbox in zip(family.children, received_segments, strict=False):
                op(segment, inbox, out=segment)
            if family.parent is not None:
                sends.append(link.isend(segment, family.parent))
    wait_all(sends)


def _receive_segments(
    link: Link, arrivals: Sequence[tuple[int, np.ndarray]], inboxes: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield the data received for each (source, segment), in an inbox valid until the next."""

    def post_receive(k: int) -> tuple[Request, np.ndarray]:
        source, segment = arrivals[k]
        inbox = inboxes[k % len(inboxes)][: segment.size]
        return link.irecv(inbox, source), inbox

    posted_receives = deque(post_receive(k) for k in range(min(len(inboxes), len(arrivals))))
    for k in range(len(arrivals)):
        request, inbox = posted_receives.popleft()
        request.wait()
        yield inbox
        if k + len(inboxes) < len(arrivals):
            posted_receives.append(post_receive(k + len(inboxes)))


def _broadcast(link: Link, halves: list[Half], receives_ahead: int) -> None:
    pending_requests: list[Request] = []
    for half, (parent, children) in halves:
        if parent is not None and not children:
            pending_requests += [link.irecv(segment, parent) for segment in half]
            continue
        posted_receives: deque[Request] = deque()
        for k, segment in enumerate(half):
            if parent is not None:
                posted_receives.extend(
                    link.irecv(s, parent)
                    for s in half[k + len(posted_receives) : k + receives_ahead]
                )
                posted_receives.popleft().wait()
            pending_requests += [link.isend(segment, child) for child in children]
    wait_all(pending_requests)


def _halves_leaf_first(group: Group, x: np.ndarray) -> list[tuple[np.ndarray, Family]]:
    """Return both halves with this rank's family in each tree, first the tree where it is a leaf.

    A leaf waits for no rank, so all its segments are in flight before this rank waits for a segment
    of the other half. If halves alternated, segments of one tree would wait for the other tree's.
    """
    halves = x[: x.size // 2], x[x.size // 2 :]
    pairs = zip(halves, families(group.link.rank, group.link.size), strict=True)
    return sorted(pairs, key=lambda pair: len(pair[1].children))


@lru_cache
def families(rank: int, size: int) -> tuple[Family, Family]:
    """Return the family of `rank` in the first and in the second tree."""

    def to_second_tree(v: int) -> int:  # the same place in the second tree; both numbered from 0
        return (v + 1) % size if size % 2 else size - 1 - v

    def from_second_tree(v: int) -> int:
        return (v - 1) % size if size % 2 else size - 1 - v

    parent, children = family_in_order(to_second_tree(rank), size)
    second_family = Family(
        None if parent is None else from_second_tree(parent), tuple(map(from_second_tree, children))
    )
    return family_in_order(rank, size), second_family


def family_in_order(rank: int, size: int) -> Family:
    """Return the parent and the children of `rank` in the tree numbered from left to right."""
    low, high, parent = 0, size, None
    while (root := _root(low, high)) != rank:
        low, high, parent = (low, root, root) if rank < root else (root + 1, high, root)
    halves = ((low, root), (root + 1, high))
    return Family(parent, tuple(_root(a, b) for a, b in halves if a < b))


def _root(low: int, high: int) -> int:
    """Return the root of nodes low .. high - 1: the largest power of two in range, less one."""
    return low + (1 << ((high - low).bit_length() - 1)) - 1
