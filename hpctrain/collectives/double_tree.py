"""Double binary tree: two trees, each for half of the vector, so that every rank works in both.

In one binary tree half of the ranks are leaves: they send, but never add or pass on. A second tree
in which these are the inner ranks uses them. Eight ranks, numbered from 1; in order, odd ones are
leaves, and mirroring (P + 1 - v; for odd P: shifting by one) makes them inner:

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
k + 1 is on its way; then the sums come down the same edges. No rank is inner in both trees: it
starts with the one in which it is a leaf, and there it waits for nobody.

Cost: up to 4L + 6k steps of n/2k bytes for k segments of a half, L = ceil(log2 P): about 2n bytes
sent per rank as in a ring, with a latency that grows as log P. Scratch: one segment. The root's
sum is copied to all ranks: the same bytes.

Source: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction
and scan", 2009.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hpctrain.collectives.chunks import segments
from hpctrain.collectives.group import Group
from hpctrain.collectives.operations import Operation
from hpctrain.transport.link import Request


class Family(NamedTuple):
    """A rank's neighbours in one tree."""

    parent: int | None
    children: tuple[int, ...]


def double_tree(group: Group, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place over all ranks of `group`."""
    _reduce(group, x, op)
    _broadcast(group, x)


def _reduce(group: Group, x: np.ndarray, op: Operation) -> None:
    sends: list[Request] = []
    for half, family in _leaf_first(group, x):
        for segment in segments(half):
            for child in family.children:
                inbox = group.scratch.like(segment)
                group.link.irecv(inbox, child).wait()
                op(segment, inbox, out=segment)
            if family.parent is not None:
                sends.append(group.link.isend(segment, family.parent))
    for send in sends:
        send.wait()


def _broadcast(group: Group, x: np.ndarray) -> None:
    under_way: list[Request] = []
    for half, family in _leaf_first(group, x):
        for segment in segments(half):
            if family.parent is not None:
                under_way.append(group.link.irecv(segment, family.parent))
            if family.children and family.parent is not None:
                under_way.pop().wait()
            under_way += [group.link.isend(segment, child) for child in family.children]
    for request in under_way:
        request.wait()


def _leaf_first(group: Group, x: np.ndarray) -> list[tuple[np.ndarray, Family]]:
    """Return both halves with our family in their trees, first the one in which we are a leaf.

    A leaf waits for nobody, so all its segments are under way before we wait for any of the
    other half. In turn, each segment of one tree would wait for one that crosses the other.
    """
    halves = np.split(x, [x.size // 2])
    both = zip(halves, families(group.link.rank, group.link.size), strict=True)
    return sorted(both, key=lambda one: len(one[1].children))


@lru_cache
def families(rank: int, size: int) -> tuple[Family, Family]:
    """Return the family of `rank` in the first and in the second tree."""

    def other(v: int) -> int:  # the same place in the second tree; both numbered from 0
        return (v + 1) % size if size % 2 else size - 1 - v

    def back(v: int) -> int:
        return (v - 1) % size if size % 2 else size - 1 - v

    parent, children = in_order(other(rank), size)
    second = Family(None if parent is None else back(parent), tuple(map(back, children)))
    return in_order(rank, size), second


def in_order(rank: int, size: int) -> Family:
    """Return the family of `rank` in the tree whose nodes, read from left to right, count up."""
    low, high, parent = 0, size, None
    while (root := _root(low, high)) != rank:
        low, high, parent = (low, root, root) if rank < root else (root + 1, high, root)
    halves = ((low, root), (root + 1, high))
    return Family(parent, tuple(_root(a, b) for a, b in halves if a < b))


def _root(low: int, high: int) -> int:
    """Return the root of nodes low .. high - 1: the largest power of two of them, less one."""
    return low + (1 << ((high - low).bit_length() - 1)) - 1
