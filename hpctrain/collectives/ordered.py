"""Sums whose bits depend neither on the number of ranks nor on the algorithm.

Float addition is not associative, so the order has to be fixed by something that P does not change:
the vector is a sum over B *blocks*, and these are added in one binary tree, whoever holds them.
Six blocks:

    level 3            012345            subtotal i of level k covers 2^k blocks from i 2^k on,
                      /      \\           or as many as there are. It is left + right; one that has
    level 2       0123        45         no right child is its left child, unchanged
                 /    \\      /
    level 1     01    23    45
               /  \\  /  \\  /  \\
    blocks     0  1  2  3  4  5

Rank r of P holds the blocks rB/P .. (r + 1)B/P - 1, rounded down. It adds up the subtotals whose
blocks it holds all, and is left with m of them: one if P and B are powers of two, else at most
2 log2(B/P) + 2. Three ranks, whose chunks are a b c; `01a` is chunk a of 01:

    rank   holds          sends to 0    to 1          to 2          adds up
     0     01                           01b           01c           a: 01 + 23, 0123 + 45
     1     23             23a                         23c           b: the same
     2     45             45a           45b                         c: the same

Each goes straight to the owner of each chunk, and the owner adds in the order of the tree.
Cost: P - 1 steps, m n(P-1)/P bytes sent per rank: with m = 1 those of a ring, in as few messages.
Scratch: segments of all that come in, SCRATCH_BYTES at most. How finished chunks then reach
everybody changes no bit of them: n(P-1)/P bytes round the ring, or in log2 P steps by doubling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from hpctrain.collectives.chunks import bounds, chunks
from hpctrain.collectives.direct import all_gather as from_neighbours
from hpctrain.collectives.group import Group
from hpctrain.collectives.operations import Operation
from hpctrain.collectives.ring import all_gather as round_the_ring
from hpctrain.collectives.tree import broadcast
from hpctrain.errors import UsageError

SCRATCH_BYTES = 2 << 20

#: Fills flat `x` with every rank's chunk; before, this rank's own is in place.
AllGather = Callable[[Group, np.ndarray], None]


class Subtotal(NamedTuple):
    """The sum `x` of the blocks `start` .. `stop` - 1."""

    start: int
    stop: int
    x: Any


@dataclass(frozen=True)
class Tree:
    """The tree over `blocks` blocks, each of `ranks` ranks holding a run of them."""

    blocks: int
    ranks: int

    def __post_init__(self) -> None:
        """Raise UsageError where a rank would hold none."""
        if self.blocks < self.ranks:
            raise UsageError(
                f"[wire] blocks is {self.blocks}, but {self.ranks} ranks were started, of which "
                f"each needs at least one: start fewer, or set blocks to {self.ranks} or more"
            )

    def run(self, rank: int) -> range:
        """Return the blocks that `rank` holds."""
        return range(rank * self.blocks // self.ranks, (rank + 1) * self.blocks // self.ranks)

    def join(self, subtotals: list[Subtotal], subtotal: Subtotal, op: Operation) -> None:
        """Put `subtotal` behind the last of `subtotals`, and add up what is complete by it.

        A sum is written into the array of its left child.
        """
        while subtotals and self.siblings(subtotals[-1], subtotal):
            left = subtotals.pop()
            op(left.x, subtotal.x, out=left.x)
            subtotal = Subtotal(left.start, subtotal.stop, left.x)
        subtotals.append(subtotal)

    def siblings(self, left: Subtotal, right: Subtotal) -> bool:
        """Return whether two subtotals that follow each other are the children of one."""
        width = left.stop - left.start
        return left.start % (2 * width) == 0 and right.stop == min(left.stop + width, self.blocks)

    @cached_property
    def held(self) -> list[list[Subtotal]]:
        """What is left of each rank's blocks once it has added up what it can; without arrays."""
        held: list[list[Subtotal]] = [[] for _ in range(self.ranks)]
        for rank, subtotals in enumerate(held):
            for block in self.run(rank):
                self.join(subtotals, Subtotal(block, block + 1, None), _no_arrays)
        return held


def sum_of_blocks(
    group: Group,
    partials: Sequence[np.ndarray],
    blocks: int,
    all_gather: AllGather = round_the_ring,
) -> np.ndarray:
    """Return the sum of `blocks` flat arrays alike, the same bytes for any number of ranks.

    `partials` are those of this rank's blocks, see `Tree.run`; they are spoilt, and the sum lies
    in the last.
    """
    tree, subtotals = Tree(blocks, group.link.size), list[Subtotal]()
    for block, x in zip(tree.run(group.link.rank), partials, strict=True):
        tree.join(subtotals, Subtotal(block, block + 1, x), np.add)
    reduce_scatter(group, tree, [subtotal.x for subtotal in subtotals], partials[-1], np.add)
    all_gather(group, partials[-1])
    return partials[-1]


def reduce_scatter(
    group: Group,
    tree: Tree,
    own: Sequence[np.ndarray],
    x: np.ndarray,
    op: Operation,
    offsets: Sequence[int] | None = None,
) -> None:
    """Write the sum over all blocks into this rank's chunk of flat `x`; all else is spoilt.

    `own` are the arrays of `tree.held[rank]`, as long as `x`, which may be one of them. Rank r's
    chunk is `offsets[r]:offsets[r + 1]`, which may be empty; without them all are even.
    """
    at = offsets or bounds(x.size, group.link.size)
    width = max(1, SCRATCH_BYTES // (x.itemsize * sum(map(len, tree.held))))
    for start in range(0, max(b - a for a, b in pairwise(at)), width):
        segment = [slice(min(a + start, b), min(a + start + width, b)) for a, b in pairwise(at)]
        _sum_segments(group, tree, own, x, op, segment)


def _sum_segments(
    group: Group,
    tree: Tree,
    own: Sequence[np.ndarray],
    x: np.ndarray,
    op: Operation,
    segment: list[slice],
) -> None:
    """Do as `reduce_scatter` with one segment of each chunk, one for each rank."""
    link, here = group.link, segment[group.link.rank]
    others = [(link.rank - step) % link.size for step in range(1, link.size)]
    inboxes = iter(_inboxes(group, sum(len(tree.held[other]) for other in others), x[here]))
    arrays = {other: [next(inboxes) for _ in tree.held[other]] for other in others}
    come = [link.irecv(one, other) for other in others for one in arrays[other] if one.size]
    gone = [
        link.isend(one[segment[other]], other)
        for other in reversed(others)
        for one in own
        if one[segment[other]].size  # no elements are no message
    ]
    for request in come:
        request.wait()
    arrays[link.rank] = [one[here] for one in own]
    subtotals: list[Subtotal] = []
    for rank, theirs in enumerate(tree.held):
        for subtotal, array in zip(theirs, arrays[rank], strict=True):
            tree.join(subtotals, subtotal._replace(x=array), op)
    x[here] = subtotals[0].x
    for request in gone:
        request.wait()


def _inboxes(group: Group, count: int, like: np.ndarray) -> np.ndarray:
    return group.scratch.take(count * like.size, like.dtype).reshape(count, like.size)


def _no_arrays(left: None, right: None, out: None) -> None:
    """Add nothing, where only the shape of the tree is asked for."""


def doubling(group: Group, x: np.ndarray) -> None:
    """Fill flat `x` with all chunks in log2 P steps; round the ring if P is no power of two.

    With distance d = 1, 2, 4, ... the partner is r xor d; each hands over the d chunks it has. The
    second half of Rabenseifner's all-reduce; see halving_doubling.py.
    """
    rank, size = group.link.rank, group.link.size
    if size & (size - 1):
        round_the_ring(group, x)
        return
    at, distance = bounds(x.size, size), 1
    while distance < size:
        mine, theirs = (
            x[at[first] : at[first + distance]]
            for first in (r // distance * distance for r in (rank, rank ^ distance))
        )
        group.link.sendrecv(mine, rank ^ distance, theirs, rank ^ distance)
        distance *= 2


def broadcasts(group: Group, x: np.ndarray) -> None:
    """Fill flat `x` with all chunks: each comes down the binomial tree of its owner."""
    for root, chunk in enumerate(chunks(x, group.link.size)):
        broadcast(group, chunk, root)


def through_memory(group: Group, x: np.ndarray) -> None:
    """Fill flat `x` with all chunks, read where node neighbours have them.

    Without node memory they go round the ring. Raises UsageError where there are several nodes.
    """
    if len(group.nodes) > 1:
        raise UsageError(
            f"algorithm direct works inside one node, seen {len(group.nodes)}; use auto"
        )
    if group.near is None:
        round_the_ring(group, x)
    else:
        from_neighbours(group, x, bounds(x.size, group.link.size))


def joined_by(allreduce: Callable[[Group, np.ndarray, Operation], None]) -> AllGather:
    """Return the all-gather that any all-reduce can do: or, over bits that one rank alone sets.

    For the bytes of an all-reduce, about twice those of an all-gather.
    """

    def all_gather(group: Group, x: np.ndarray) -> None:
        bits = x.view(f"i{x.itemsize}")
        for rank, chunk in enumerate(chunks(bits, group.link.size)):
            if rank != group.link.rank:
                chunk[...] = 0
        allreduce(group, bits, np.bitwise_or)

    return all_gather


#: The all-reduces whose second half is an all-gather that can be had alone.
ALL_GATHERS: dict[str, AllGather] = {
    "auto": doubling,
    "ring": round_the_ring,
    "halving-doubling": doubling,
    "recursive-doubling": doubling,
    "tree": broadcasts,
    "direct": through_memory,
}
