"""Ring all-reduce: every rank sends 1/P of the vector to its right neighbour, 2(P-1) times.

The vector is cut into P chunks. Four ranks, chunks a b c d; `2` means "the sum of two ranks":

    rank   start     reduce-scatter                          all-gather
     0    a b c d    a  b  c 2d    a  b 3c 2d    a 4b 3c 2d   4a 4b 3c 2d  ...  4a 4b 4c 4d
     1    a b c d   2a  b  c  d   2a  b  c 3d   2a  b 4c 3d   2a 4b 4c 3d  ...  4a 4b 4c 4d
     2    a b c d    a 2b  c  d   3a 2b  c  d   3a 2b  c 4d   3a 2b 4c 4d  ...  4a 4b 4c 4d
     3    a b c d    a  b 2c  d    a 3b 2c  d   4a 3b 2c  d   4a 3b 2c 4d  ...  4a 4b 4c 4d

Index rule: at step s of the first half, rank r sends chunk r - s and adds what comes from the
left to chunk r - s - 1; so it ends owning the sum of chunk r + 1. At step s of the second half
it sends chunk r + 1 - s and receives chunk r - s into place.

Cost: 2(P-1) steps, 2n(P-1)/P bytes sent per rank (the least possible), n(P-1)/P elements added.
Scratch: one chunk, n/P. The sum of a chunk is made along one path and then only copied, so all
ranks end with the same bytes.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009.
"""

from __future__ import annotations

import numpy as np

from hpctrain.collectives.chunks import chunks
from hpctrain.collectives.group import Group


def ring(group: Group, x: np.ndarray, op: np.ufunc) -> None:
    """Reduce flat `x` in place over all ranks of `group`."""
    link = group.link
    rank, size = link.rank, link.size
    left, right = (rank - 1) % size, (rank + 1) % size
    chunk = chunks(x, size)
    for step in range(size - 1):
        mine, theirs = chunk[(rank - step) % size], chunk[(rank - step - 1) % size]
        inbox = group.scratch.like(theirs)
        link.sendrecv(mine, right, inbox, left)
        op(theirs, inbox, out=theirs)
    for step in range(size - 1):
        mine, theirs = chunk[(rank + 1 - step) % size], chunk[(rank - step) % size]
        link.sendrecv(mine, right, theirs, left)
