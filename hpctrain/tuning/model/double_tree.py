"""The schedule of the double binary tree, replayed on clocks, level by level.

Places are counted from 1, so that the height of place v is the number of zeros in which v ends:

    height 2          4            left child of v:   v - b, where b = 2^(height - 1)
                    /   \\          right child of v:  v + b, or, where that is beyond P,
    height 1       2     6                            v + the largest power of two up to P - v
                  / \\   / \\
    height 0     1   3 5   7

A rank is inner in one of the two trees at most. In the other, where it is a leaf, it sends first
and receives last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpctrain.collectives.chunks import SEGMENT_BYTES, STREAM_SEGMENT_BYTES
from hpctrain.tuning.model.loggp import Array, Clocks, Route, Train


@dataclass(frozen=True)
class Level:
    """The inner ranks at one height: edges to left and right children and to parents."""

    children: tuple[Route, ...]
    parents: Route


@dataclass(frozen=True)
class Tree:
    """One tree's edges in one direction: levels from below, and the edges of leaves."""

    levels: list[Level]
    leaves: Route


def double_tree(clocks: Clocks, n: float) -> None:
    """Reduce either half of the vector up its tree, then broadcast it down."""
    if clocks.size == 1:
        return
    _reduce(clocks, n / 2)
    _broadcast(clocks, n / 2)


def _reduce(clocks: Clocks, half_bytes: float) -> None:
    reduce_trees = _make_trees(clocks, reduce_trees=True)
    trains = [
        [clocks.send(tree.leaves, *piece) for piece in _count_half_segments(clocks, half_bytes)]
        for tree in reduce_trees
    ]
    for tree, from_leaves in zip(reduce_trees, trains, strict=True):
        for train in from_leaves:
            for k in range(train.count):  # each message is its own train
                first = train.first + k * train.interval
                _reduce_phase(clocks, tree, Train(first, train.interval, 1, train.nbytes))
    clocks.wait_until_sent()


def _reduce_phase(clocks: Clocks, tree: Tree, from_leaves: Train) -> None:
    """Pass one segment from the leaves to the root."""
    arrival = np.zeros(clocks.size)
    arrival[tree.leaves.senders] = from_leaves.first
    for level in tree.levels:
        for route in level.children:
            arriving_train = Train(arrival[route.senders], 0.0, 1, from_leaves.nbytes)
            clocks.receive(route, arriving_train, adds=True)
        arrival[level.parents.senders] = clocks.send(level.parents, from_leaves.nbytes).first


def _broadcast(clocks: Clocks, half_bytes: float) -> None:
    # All costs are sums and maxima, so the leaves' last receives can be added up from the start.
    leaf_clocks = Clocks(clocks.cluster, clocks.nodes, -np.inf, clocks.slow_factors)
    broadcast_trees = _make_trees(clocks, reduce_trees=False)
    for tree in broadcast_trees:
        for length, count in _count_half_segments(clocks, half_bytes):
            for _ in range(count):
                _broadcast_phase(clocks, leaf_clocks, tree, length)
    for tree in broadcast_trees:
        for length, count in _count_half_segments(clocks, half_bytes):
            ready_times = np.full(len(tree.leaves.receivers), -np.inf)
            clocks.receive(tree.leaves, Train(ready_times, 0.0, count, length))
    clocks.now = np.maximum(clocks.now, leaf_clocks.now)
    clocks.wait_until_sent()


def _broadcast_phase(clocks: Clocks, leaf_clocks: Clocks, tree: Tree, nbytes: float) -> None:
    """Pass one segment from the root to the leaves."""
    arrival = np.zeros(clocks.size)
    for level in reversed(tree.levels):
        arriving_train = Train(arrival[level.parents.receivers], 0.0, 1, nbytes)
        clocks.receive(level.parents, arriving_train)
        for route in level.children:
            arrival[route.receivers] = clocks.send(route, nbytes).first
    leaf_clocks.receive(tree.leaves, Train(arrival[tree.leaves.receivers], 0.0, 1, nbytes))


def _make_trees(clocks: Clocks, reduce_trees: bool) -> list[Tree]:
    """Return both trees; places of ranks in the second are mirrored, or shifted where P is odd."""
    ranks = np.arange(clocks.size)
    second_order = np.roll(ranks, 1) if clocks.size % 2 else ranks[::-1]
    return [
        _make_tree(clocks, np.insert(order, 0, 0), reduce_trees) for order in (ranks, second_order)
    ]


def _make_tree(clocks: Clocks, ranks_by_place: Array, reduce_trees: bool) -> Tree:
    """Return the tree with `rank[v]` at place v = 1 .. P."""
    parent, is_right_child = _find_parents(clocks.size)
    child_indexes = np.flatnonzero(parent)
    height, parent_height = _heights(child_indexes), _heights(parent[child_indexes])
    edge_ranks = (ranks_by_place[child_indexes], ranks_by_place[parent[child_indexes]])
    # All edges are busy at the same time, so they share the cards.
    edges = clocks.route(*(edge_ranks if reduce_trees else edge_ranks[::-1]))
    levels = [
        Level(
            tuple(
                edges.select((parent_height == h) & (is_right_child[child_indexes] == is_right))
                for is_right in (0, 1)
            ),
            edges.select(height == h),
        )
        for h in range(1, clocks.size.bit_length())
    ]
    return Tree(levels, edges.select(height == 0))


def _find_parents(size: int) -> tuple[Array, Array]:
    """Return for each place its parent, 0 for the root, and whether it is the right child."""
    parent, is_right_child = np.zeros(size + 1, int), np.zeros(size + 1, int)
    v = np.arange(2, size + 1, 2)
    b = 1 << (_heights(v) - 1)
    parent[v - b] = v
    v, b = v[v < size], b[v < size]
    child = v + np.minimum(b, 1 << _log2(size - v))
    parent[child], is_right_child[child] = v, 1
    return parent, is_right_child


def _heights(v: Array) -> Array:
    return _log2(v & -v)


def _log2(v: Array) -> Array:
    """Return the binary logarithm of v > 0, rounded down: frexp is exact."""
    return np.frexp(v)[1] - 1


def _count_half_segments(clocks: Clocks, half_bytes: float) -> list[tuple[float, int]]:
    """Cut a half into segments, shorter ones between nodes."""
    return count_segments(
        half_bytes, STREAM_SEGMENT_BYTES if np.ptp(clocks.nodes) else SEGMENT_BYTES
    )


def count_segments(n: float, segment_bytes: int = SEGMENT_BYTES) -> list[tuple[float, int]]:
    """Return (bytes, count) of the whole segments of `n` bytes, and of the remainder."""
    full_segments, remaining_bytes = divmod(n, segment_bytes)
    pieces = (segment_bytes, int(full_segments)), (remaining_bytes, int(remaining_bytes > 0))
    return [(length, count) for length, count in pieces if count]
