"""Vectors longer than one MPI message: 2 GiB + 16 bytes on two ranks, 6 GiB of memory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from ranks import on_ranks

from hpctrain.collectives import ALLREDUCE, Group, broadcast
from hpctrain.collectives.chunks import bounds
from hpctrain.collectives.ring import all_gather, plain_ring
from hpctrain.transport.mpi.link import MAX_PIECE_BYTES

LENGTH = ((2 << 30) + 16) // 4  # of int32: rank r holds r, 1 + r, 2 + r, ...


def is_ramp(x: np.ndarray, factor: int, first: int) -> bool:
    """Return whether x[i] = factor i + first, a block at a time: no second vector is made."""
    cuts = bounds(x.size, 512)
    return all(
        np.array_equal(x[a:b], np.arange(a, b, dtype=x.dtype) * factor + first)
        for a, b in pairwise(cuts)
    )


def send(link, x):
    (link.isend(x, 1) if link.rank == 0 else link.irecv(x, 0)).wait()


def spoil_all_but_our_chunk(link, x):
    a, b = bounds(x.size, 2)[link.rank : link.rank + 2]
    x[:a] = x[b:] = -1
    x[a:b] -= link.rank  # as rank 0 had it


#: What is called on `x`, and the ramp that both ranks end with
CALLS = {
    "ring": (lambda group, x: ALLREDUCE["ring"](group, x, np.add), (2, 1)),
    "plain-ring": (lambda group, x: plain_ring(group, x, np.add), (2, 1)),
    "halving-doubling": (lambda group, x: ALLREDUCE["halving-doubling"](group, x, np.add), (2, 1)),
    "double-tree": (lambda group, x: ALLREDUCE["double-tree"](group, x, np.add), (2, 1)),
    "native": (lambda group, x: ALLREDUCE["native"](group, x, np.add), (2, 1)),
    "send": (lambda group, x: send(group.link, x), (1, 0)),
    "broadcast": (lambda group, x: broadcast(group, x), (1, 0)),
    "all-gather": (
        lambda group, x: (spoil_all_but_our_chunk(group.link, x), all_gather(group, x)),
        (1, 0),
    ),
}


@pytest.mark.full
@pytest.mark.timeout(300)
@on_ranks(mpi=(2,))
@pytest.mark.parametrize("name", CALLS)
def test_two_gib_and_16_bytes(ranks, name):
    call, ramp = CALLS[name]

    def body(world):
        assert (
            world.link.endpoint.waits.max_piece_bytes == MAX_PIECE_BYTES < LENGTH * 2
        )  # chunks of 1 GiB + 8 are cut too
        x = np.arange(LENGTH, dtype=np.int32)
        x += world.rank
        call(Group(world.link), x)
        assert is_ramp(x, *ramp)

    ranks(body)
