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

import numpy as np

from hpctrain.collectives.chunks import chunks
from hpctrain.collectives.group import Group
from hpctrain.transport.link import wait_all


def gather(group: Group, x: np.ndarray, root: int = 0) -> None:
    """Fill `root`'s flat `x` with every rank's chunk, which is in place in that rank's `x`."""
    link, chunk_views = group.link, chunks(x, group.link.size)
    if link.rank != root:
        link.isend(chunk_views[link.rank], root).wait()
        return
    wait_all([link.irecv(chunk_views[rank], rank) for rank in range(link.size) if rank != root])


def scatter(group: Group, x: np.ndarray, root: int = 0) -> np.ndarray:
    """Return this rank's chunk of flat `x` as a view, filled from `root`'s `x`."""
    link, chunk_views = group.link, chunks(x, group.link.size)
    if link.rank == root:
        wait_all([link.isend(chunk_views[rank], rank) for rank in range(link.size) if rank != root])
    else:
        link.irecv(chunk_views[link.rank], root).wait()
    return chunk_views[link.rank]


def all_to_all(group: Group, x: np.ndarray, out: np.ndarray) -> None:
    """Write chunk r of every rank's `x` into this rank r's `out`, in the order of ranks.

    `x` and `out` are flat, (P m,) each, and may not overlap: all chunks have m elements.
    """
    link = group.link
    rank, size = link.rank, link.size
    outgoing, incoming = x.reshape(size, -1), out.reshape(size, -1)
    incoming[rank] = outgoing[rank]
    for step in range(1, size):
        target, source = (rank + step) % size, (rank - step) % size
        link.sendrecv(outgoing[target], target, incoming[source], source)
