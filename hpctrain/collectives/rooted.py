"""Gather, scatter and all-to-all: every chunk goes straight from its source to its destination.

Four ranks, all-to-all; rank r's chunk for rank t is written `rt`, and step s pairs r with r + s:

    rank   before            after              step 1        step 2        step 3
     0     00 01 02 03       00 10 20 30        sends 01      02            03
     1     10 11 12 13       01 11 21 31        sends 12      13            10
     2     20 21 22 23       02 12 22 32        sends 23      20            21
     3     30 31 32 33       03 13 23 33        sends 30      31            32

Cost: P-1 steps and n(P-1)/P bytes sent per rank in all-to-all. Gather and scatter move n(P-1)/P
bytes in P-1 messages over the root's link: the fewest bytes, with a latency that grows with P.
Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", 2005.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.collectives.chunks import chunks
from hpctrain.collectives.group import Group
from hpctrain.core.xp import Array
from hpctrain.transport.link import wait_all


def gather(group: Group, x: np.ndarray, root: int = 0) -> None:
    """Fill `root`'s flat `x` with every rank's chunk, which is in place in that rank's `x`."""
    chunk_views = chunks(x, group.link.size)
    gather_parts(group, chunk_views[group.link.rank], chunk_views, root)


def gather_parts(group: Group, own: Array, parts: Sequence[Array], root: int) -> None:
    """Fill part r of `root` with rank r's `own`, except the root's part; lengths may differ."""
    link = group.link
    if link.rank != root:
        link.isend(own, root).wait()
        return
    wait_all([link.irecv(part, rank) for rank, part in enumerate(parts) if rank != root])


def scatter(group: Group, x: np.ndarray, root: int = 0) -> np.ndarray:
    """Return this rank's chunk of flat `x` as a view, filled from `root`'s `x`."""
    chunk_views = chunks(x, group.link.size)
    scatter_parts(group, chunk_views, chunk_views[group.link.rank], root)
    return chunk_views[group.link.rank]


def scatter_parts(group: Group, parts: Sequence[Array], own: Array, root: int) -> None:
    """Fill rank r's `own` with part r of `root`, except the root's own; lengths may differ."""
    link = group.link
    if link.rank != root:
        link.irecv(own, root).wait()
        return
    wait_all([link.isend(part, rank) for rank, part in enumerate(parts) if rank != root])


def all_to_all(group: Group, x: np.ndarray, out: np.ndarray) -> None:
    """Write chunk r of every rank's `x` into this rank r's `out`, in the order of ranks.

    `x` and `out` are flat, (P m,) each, and may not overlap: all chunks have m elements.
    """
    size = group.link.size
    exchange_parts(group, x.reshape(size, -1), out.reshape(size, -1))


def exchange_parts(
    group: Group, outgoing: Sequence[Array] | np.ndarray, incoming: Sequence[Array] | np.ndarray
) -> None:
    """Fill incoming part r with rank r's outgoing part for this rank; lengths may differ."""
    link = group.link
    rank, size = link.rank, link.size
    incoming[rank][:] = outgoing[rank]
    for step in range(1, size):
        target, source = (rank + step) % size, (rank - step) % size
        link.sendrecv(outgoing[target], target, incoming[source], source)
