"""Sums whose bits depend neither on the number of ranks nor on the algorithm.

Float addition is not associative, so the order must be independent of P: the vector is a sum over B
*blocks*, and these are added in one binary tree, on whichever ranks they lie.
Six blocks:

    level 3            012345            subtotal i of level k covers 2^k blocks from i 2^k on,
                      /      \\           or as many as there are. It is left + right; one that has
    level 2       0123        45         no right child is its left child, unchanged
                 /    \\      /
    level 1     01    23    45
               /  \\  /  \\  /  \\
    blocks     0  1  2  3  4  5

Rank r of P holds the blocks rB/P .. (r + 1)B/P - 1, rounded down. It adds up the subtotals whose
blocks are all its own, which leaves m of them: one if P and B are powers of two, else at most
2 log2(B/P) + 2. Three ranks, whose chunks are a b c; `01a` is chunk a of 01:

    rank   holds          sends to 0    to 1          to 2          adds up
     0     01                           01b           01c           a: 01 + 23, 0123 + 45
     1     23             23a                         23c           b: the same
     2     45             45a           45b                         c: the same

The chunks of each subtotal are sent to their owners, which add them in the order of the tree. If
all ranks share memory and m is 1, owners read node memory instead (`reduce_scatter_in_memory`).
Cost: P - 1 steps, m n(P-1)/P bytes sent per rank; with m = 1 as many bytes and messages as a ring.
Scratch: segments of all incoming subtotals, SCRATCH_BYTES at most. The all-gather of finished
chunks changes no bit: n(P-1)/P bytes round the ring, or in log2 P steps by doubling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from hpctrain.collectives.all_gathers import AllGather, ranks_share_memory
from hpctrain.collectives.chunks import bounds
from hpctrain.collectives.direct import agree_on_arrays
from hpctrain.collectives.group import Group
from hpctrain.collectives.reductions.operations import Operation
from hpctrain.collectives.ring import all_gather as round_the_ring
from hpctrain.core.errors import UsageError
from hpctrain.transport.link import wait_all

SCRATCH_BYTES = 2 << 20
TILE_BYTES = 256 << 10  # the sum over all ranks' tiles, which are added while in the cache

#: Returns the array that holds the sum of a left and a right array; it may be either.
AddFunction = Callable[[Any, Any], Any]


class Subtotal(NamedTuple):
    """The sum `x` of the blocks `start` .. `stop` - 1."""

    start: int
    stop: int
    x: Any


def make_in_place_add(op: Operation) -> AddFunction:
    """Return a function that adds two arrays in place of the first."""
    return lambda left, right: op(left, right, out=left)


@dataclass(frozen=True)
class SumTree:
    """The tree over `blocks` blocks, divided into a range for each of `ranks` ranks."""

    blocks: int
    ranks: int

    def __post_init__(self) -> None:
        """Raise UsageError if a rank would hold no block."""
        if self.blocks < self.ranks:
            raise UsageError(
                f"[wire] blocks is {self.blocks}, but {self.ranks} ranks were started, of which "
                f"each needs at least one: start fewer, or set blocks to {self.ranks} or more"
            )

    def blocks_of(self, rank: int) -> range:
        """Return the blocks that `rank` holds."""
        return range(rank * self.blocks // self.ranks, (rank + 1) * self.blocks // self.ranks)

    def append_subtotal(
        self, subtotals: list[Subtotal], subtotal: Subtotal, add: AddFunction
    ) -> None:
        """Append `subtotal` to `subtotals`, after adding each left sibling to it."""
        while subtotals and self.are_siblings(subtotals[-1], subtotal):
            left = subtotals.pop()
            subtotal = Subtotal(left.start, subtotal.stop, add(left.x, subtotal.x))
        subtotals.append(subtotal)

    def sum_subtotals(self, arrays: Sequence[np.ndarray], add: AddFunction) -> np.ndarray:
        """Return the sum over all blocks, given the arrays of all ranks' subtotals, in order."""
        subtotals: list[Subtotal] = []
        for subtotal, array in zip(chain.from_iterable(self.local_subtotals), arrays, strict=True):
            self.append_subtotal(subtotals, subtotal._replace(x=array), add)
        (total,) = subtotals
        return total.x

    def are_siblings(self, left: Subtotal, right: Subtotal) -> bool:
        """Return whether two consecutive subtotals have the same parent."""
        width = left.stop - left.start
        return left.start % (2 * width) == 0 and right.stop == min(left.stop + width, self.blocks)

    @cached_property
    def local_subtotals(self) -> list[list[Subtotal]]:
        """The subtotals of each rank after all local additions; without arrays."""
        local_subtotals: list[list[Subtotal]] = [[] for _ in range(self.ranks)]
        for rank, subtotals in enumerate(local_subtotals):
            for block in self.blocks_of(rank):
                self.append_subtotal(
                    subtotals, Subtotal(block, block + 1, None), lambda left, right: None
                )
        return local_subtotals


def sum_blocks(
    group: Group,
    partials: Sequence[np.ndarray],
    blocks: int,
    all_gather: AllGather = round_the_ring,
) -> np.ndarray:
    """Return the sum of `blocks` equal flat arrays, the same bytes for any number of ranks.

    `partials` are the arrays of this rank's blocks, see `SumTree.blocks_of`; they are overwritten,
    the last with the sum.
    """
    tree, subtotals = SumTree(blocks, group.link.size), list[Subtotal]()
    for block, x in zip(tree.blocks_of(group.link.rank), partials, strict=True):
        tree.append_subtotal(subtotals, Subtotal(block, block + 1, x), make_in_place_add(np.add))
    reduce_scatter(group, tree, [subtotal.x for subtotal in subtotals], partials[-1], np.add)
    all_gather(group, partials[-1])
    return partials[-1]


def reduce_scatter(
    group: Group,
    tree: SumTree,
    own_arrays: Sequence[np.ndarray],
    x: np.ndarray,
    op: Operation,
    offsets: Sequence[int] | None = None,
) -> None:
    """Write the sum over all blocks into this rank's chunk of flat `x`; overwrite the rest.

    `own_arrays` are the arrays of `tree.local_subtotals[rank]`, as long as `x`, and may include
    `x`. Rank r's chunk is `offsets[r]:offsets[r + 1]`, which may be empty; by default chunks are
    even.
    """
    chunk_offsets = offsets or bounds(x.size, group.link.size)
    segment_length = max(1, SCRATCH_BYTES // (x.itemsize * sum(map(len, tree.local_subtotals))))
    for start in range(0, max(b - a for a, b in pairwise(chunk_offsets)), segment_length):
        segment = [
            slice(min(a + start, b), min(a + start + segment_length, b))
            for a, b in pairwise(chunk_offsets)
        ]
        _sum_segments(group, tree, own_arrays, x, op, segment)


def reduce_scatter_in_memory(
    group: Group, tree: SumTree, own_arrays: Sequence[np.ndarray], x: np.ndarray, op: Operation
) -> None:
    """Reduce-scatter as `reduce_scatter`, without messages if all subtotals are in node memory.

    Node memory is used only if each rank has a single subtotal; otherwise ranks send messages.
    """
    has_single_subtotals = all(len(subtotals) == 1 for subtotals in tree.local_subtotals)
    buffers = group.node_buffers if has_single_subtotals and ranks_share_memory(group) else None
    arrays = None if buffers is None else agree_on_arrays(group, buffers, x)
    if arrays is None:
        reduce_scatter(group, tree, own_arrays, x, op)
        return
    size, chunk_offsets = group.link.size, bounds(x.size, group.link.size)
    first, stop = chunk_offsets[group.link.rank], chunk_offsets[group.link.rank + 1]
    tile_length = max(1, TILE_BYTES // (size * x.itemsize))
    # A row for each addition: neighbours' arrays are read-only.
    rows = group.scratch.buffer(x, (size - 1) * tile_length).reshape(size - 1, tile_length)
    for start in range(first, stop, tile_length):
        tile = slice(start, min(start + tile_length, stop))
        free_buffers = iter(rows[:, : tile.stop - start])
        add_into_row = partial(_add_into_next, op, free_buffers)
        x[tile] = tree.sum_subtotals([array[tile] for array in arrays], add_into_row)


def _add_into_next(
    op: Operation, free_buffers: Iterator[np.ndarray], left: np.ndarray, right: np.ndarray
) -> np.ndarray:
    return op(left, right, out=next(free_buffers))


def _sum_segments(
    group: Group,
    tree: SumTree,
    own_arrays: Sequence[np.ndarray],
    x: np.ndarray,
    op: Operation,
    segment: list[slice],
) -> None:
    """Reduce-scatter one segment of each rank's chunk."""
    link, own_chunk = group.link, segment[group.link.rank]
    peers = [(link.rank - step) % link.size for step in range(1, link.size)]
    length, count = x[own_chunk].size, sum(len(tree.local_subtotals[peer]) for peer in peers)
    inboxes = iter(group.scratch.buffer(x, count * length).reshape(count, length))
    arrays = {peer: [next(inboxes) for _ in tree.local_subtotals[peer]] for peer in peers}
    receives = [link.irecv(array, peer) for peer in peers for array in arrays[peer] if array.size]
    sends = [
        link.isend(array[segment[peer]], peer)
        for peer in reversed(peers)
        for array in own_arrays
        if array[segment[peer]].size  # empty segments are not sent
    ]
    wait_all(receives)
    arrays[link.rank] = [array[own_chunk] for array in own_arrays]
    ordered_arrays = [array for rank in range(link.size) for array in arrays[rank]]
    x[own_chunk] = tree.sum_subtotals(ordered_arrays, make_in_place_add(op))
    wait_all(sends)
