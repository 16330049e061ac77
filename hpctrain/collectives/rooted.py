"""Gather, scatter and all-to-all: every chunk goes straight from its source to its destination.

Four ranks, all-to-all; rank r's chunk for rank t is written `rt`, and step s pairs r with r + s:

    rank   before            after              step 1        step 2        step 3
     0     00 01 02 03       00 10 20 30        sends 01      02            03
     1     10 11 12 13       01 11 21 31        sends 12      13            10
     2     20 21 22 23       02 12 22 32        sends 23      20            21
     3     30 31 32 33       03 13 23 33        sends 30      31            32

Cost: P-1 steps and n(P-1)/P bytes sent per rank in all-to-all; gather and scatter move n(P-1)/P
bytes over the root's link, P-1 messages: the fewest bytes, with a latency that grows with P.
Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", 2005.
"""

from __future__ import annotations

import numpy as np

from hpctrain.collectives.chunks import chunks
from hpctrain.collectives.group import Group


def gather(group: Group, x: np.ndarray, root: int = 0) -> None:
    """Fill `root`'s flat `x` with every rank's chunk; each rank's own is in place before."""
    link, chunk = group.link, chunks(x, group.link.size)
    if link.rank != root:
        link.isend(chunk[link.rank], root).wait()
        return
    for request in [link.irecv(chunk[rank], rank) for rank in range(link.size) if rank != root]:
        request.wait()


def scatter(group: Group, x: np.ndarray, root: int = 0) -> np.ndarray:
    """Return this rank's chunk of flat `x` as a view, filled from `root`'s `x`."""
    link, chunk = group.link, chunks(x, group.link.size)
    if link.rank == root:
        for request in [link.isend(chunk[rank], rank) for rank in range(link.size) if rank != root]:
            request.wait()
    else:
        link.irecv(chunk[link.rank], root).wait()
    return chunk[link.rank]


def all_to_all(group: Group, x: np.ndarray, out: np.ndarray) -> None:
    """Write chunk r of every rank's `x` into this rank r's `out`, in the order of ranks.

    `x` and `out` are flat, (P m,) each: all chunks have m elements, and they may not overlap.
    """
    link = group.link
    rank, size = link.rank, link.size
    outgoing, incoming = x.reshape(size, -1), out.reshape(size, -1)
    incoming[rank] = outgoing[rank]
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        link.sendrecv(outgoing[to], to, incoming[source], source)
