"""All-gathers: copy each rank's reduced chunk to all ranks; all hold the same bytes.

    ring          P - 1 steps round the ring                       n(P-1)/P bytes sent per rank
    doubling      log2 P steps, 1, 2, 4, ... chunks at a time      n(P-1)/P
    broadcasts    each chunk down the tree of its owner            n(P-1)/P on average
    direct        read from node neighbours' memory                0
    all-reduce    bitwise or by any algorithm, other chunks 0      as the all-reduce

Before the call each rank's own chunk of `x` is in place: chunk r is r n/P .. (r + 1) n/P.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpctrain.collectives.chunks import bounds, chunks
from hpctrain.collectives.direct import all_gather as direct_all_gather
from hpctrain.collectives.group import Group
from hpctrain.collectives.reductions.operations import Operation
from hpctrain.collectives.ring import all_gather as round_the_ring
from hpctrain.collectives.tree import broadcast
from hpctrain.core.errors import UsageError

#: Fills flat `x` with every rank's chunk.
AllGather = Callable[[Group, np.ndarray], None]


def gather_by_doubling(group: Group, x: np.ndarray) -> None:
    """Fill flat `x` with all chunks in log2 P steps; round the ring if P is no power of two.

    With distance d = 1, 2, 4, ... the partner is r xor d; each rank sends the d chunks it holds.
    This is the second half of Rabenseifner's all-reduce; see halving_doubling.py.
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


def gather_by_broadcasts(group: Group, x: np.ndarray) -> None:
    """Fill flat `x` with all chunks, each broadcast down the binomial tree of its owner."""
    for root, chunk in enumerate(chunks(x, group.link.size)):
        broadcast(group, chunk, root)


def gather_through_memory(group: Group, x: np.ndarray) -> None:
    """Fill flat `x` with all chunks, read from node neighbours' memory.

    Without node memory the chunks go round the ring. Raises UsageError on several nodes.
    """
    if len(group.nodes) > 1:
        raise UsageError(
            f"algorithm direct works inside one node, seen {len(group.nodes)}; use auto"
        )
    if group.node_buffers is None:
        round_the_ring(group, x)
    else:
        direct_all_gather(group, x, bounds(x.size, group.link.size))


def gather_by_allreduce(allreduce: Callable[[Group, np.ndarray, Operation], None]) -> AllGather:
    """Return the all-gather by `allreduce`: bitwise or, with all other chunks zero.

    Such an all-gather sends as many bytes as the all-reduce, about twice the fewest possible.
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
    (gather_through_memory if ranks_share_memory(group) else gather_by_doubling)(group, x)


def ranks_share_memory(group: Group) -> bool:
    """Return whether all ranks of `group` are on one node and share memory."""
    return len(group.nodes) == 1 and group.node_buffers is not None


#: The name of an all-reduce: the all-gather that is its second half.
ALL_GATHERS: dict[str, AllGather] = {
    "auto": auto,
    "ring": round_the_ring,
    "halving-doubling": gather_by_doubling,
    "recursive-doubling": gather_by_doubling,
    "tree": gather_by_broadcasts,
    "direct": gather_through_memory,
}

#: With these all-gathers, other exchanges also go through node memory where possible.
IN_MEMORY_ALL_GATHERS = (auto, gather_through_memory)
