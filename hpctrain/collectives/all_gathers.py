"""All-gathers: copy each rank's finished chunk to all ranks, bit by bit the same.

    ring          P - 1 steps round the ring                       n(P-1)/P bytes sent per rank
    doubling      log2 P steps, 1, 2, 4, ... chunks at a time      n(P-1)/P
    broadcasts    each chunk down the tree of its owner            n(P-1)/P on average
    direct        read from node neighbours' memory                0
    joined_by     or, by any all-reduce                            those of the all-reduce

Before, each rank's own chunk of `x` is in place: chunk r is r n/P .. (r + 1) n/P.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpctrain.collectives.chunks import bounds, chunks
from hpctrain.collectives.direct import all_gather as from_neighbours
from hpctrain.collectives.group import Group
from hpctrain.collectives.reductions.operations import Operation
from hpctrain.collectives.ring import all_gather as round_the_ring
from hpctrain.collectives.tree import broadcast
from hpctrain.core.errors import UsageError

#: Fills flat `x` with every rank's chunk.
AllGather = Callable[[Group, np.ndarray], None]


def doubling(group: Group, x: np.ndarray) -> None:
    """Fill flat `x` with all chunks in log2 P steps; round the ring if P is no power of two.

    With distance d = 1, 2, 4, ... the partner is r xor d; each sends the d chunks it has. The
    second half of Rabenseifner's all-reduce; see halving_doubling.py.
    """
    rank, size = group.link.rank, group.link.size
    if size & (size - 1):
        round_the_ring(group, x)
        return
    offsets, distance = bounds(x.size, size), 1
    while distance < size:
        sent_range, received_range = (
            x[offsets[first] : offsets[first + distance]]
            for first in (r // distance * distance for r in (rank, rank ^ distance))
        )
        group.link.sendrecv(sent_range, rank ^ distance, received_range, rank ^ distance)
        distance *= 2


def broadcasts(group: Group, x: np.ndarray) -> None:
    """Fill flat `x` with all chunks, each broadcast down the binomial tree of its owner."""
    for root, chunk in enumerate(chunks(x, group.link.size)):
        broadcast(group, chunk, root)


def through_memory(group: Group, x: np.ndarray) -> None:
    """Fill flat `x` with all chunks, read from node neighbours' memory.

    Without node memory they go round the ring. Raises UsageError on several nodes.
    """
    if len(group.nodes) > 1:
        raise UsageError(
            f"algorithm direct works inside one node, seen {len(group.nodes)}; use auto"
        )
    if group.node_buffers is None:
        round_the_ring(group, x)
    else:
        from_neighbours(group, x, bounds(x.size, group.link.size))


def joined_by(allreduce: Callable[[Group, np.ndarray, Operation], None]) -> AllGather:
    """Return the all-gather by `allreduce`: bitwise or, with all other chunks zero.

    It sends the bytes of an all-reduce, about twice those of an all-gather.
    """

    def all_gather(group: Group, x: np.ndarray) -> None:
        bits = x.view(f"i{x.itemsize}")
        for rank, chunk in enumerate(chunks(bits, group.link.size)):
            if rank != group.link.rank:
                chunk[...] = 0
        allreduce(group, bits, np.bitwise_or)

    return all_gather


def auto(group: Group, x: np.ndarray) -> None:
    """Fill flat `x` with all chunks: through memory if all ranks share it, else by doubling."""
    (through_memory if all_share_memory(group) else doubling)(group, x)


def all_share_memory(group: Group) -> bool:
    """Return whether all ranks of `group` are on one node and share memory."""
    return len(group.nodes) == 1 and group.node_buffers is not None


#: The all-gathers that are the second half of an all-reduce, by its name.
ALL_GATHERS: dict[str, AllGather] = {
    "auto": auto,
    "ring": round_the_ring,
    "halving-doubling": doubling,
    "recursive-doubling": doubling,
    "tree": broadcasts,
    "direct": through_memory,
}

#: Those with which other exchanges also go through memory if possible.
IN_MEMORY = (auto, through_memory)
