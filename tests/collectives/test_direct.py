"""Sums straight out of neighbours' memory: wherever arrays lie, however long they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import dtype_of, expected, length, vector
from ranks import THREAD_RANKS, on_ranks, run_on

from hpctrain.collectives import DTYPES, OPERATIONS, direct, operation
from hpctrain.collectives.direct import all_gather, direct_shared, parts, reduce_scatter
from hpctrain.errors import TransportError, UsageError
from hpctrain.transport.local import run_ranks
from hpctrain.world import over_threads

LENGTHS = ("0", "1", "P-1", "P", "P+1", "5003", "100003")


def in_place(group, x, op):
    direct(group, x, op)
    return x


def in_parts(group, x, op):
    mine = reduce_scatter(group, x, op)
    assert mine.size == np.diff(parts(x, group.link.size))[group.link.rank]
    all_gather(group, x)
    return x


#: What is called, and on what: an array in node memory, one that no neighbour sees, or either.
CALLS = {"direct": in_place, "shared": direct_shared, "reduce-scatter, all-gather": in_parts}
ARRAYS = {
    "resident": lambda rank, seen, plain: seen[: plain.size],
    "plain": lambda rank, seen, plain: plain,
    "mixed": lambda rank, seen, plain: plain if rank else seen[: plain.size],
    "elsewhere": lambda rank, seen, plain: seen[rank % 2 * plain.size :][: plain.size],
}


@on_ranks(*THREAD_RANKS)
@pytest.mark.parametrize("where", ARRAYS)
@pytest.mark.parametrize("call", CALLS)
def test_exact_on_integers(ranks, call, where):
    """Every length, dtype and operation, to the last bit, and the same bytes on all ranks."""

    def body(world):
        group = replace(world.main, spins=True)
        for word in LENGTHS:
            n = length(word, world.size)
            if world.size == 1:
                continue
            for dtype in DTYPES:
                seen = world.memory.zeros(2 * n, dtype_of(dtype))
                x = ARRAYS[where](world.rank, seen, np.zeros(n, seen.dtype))
                for op in OPERATIONS:
                    group.link.barrier()  # nobody writes what others still read
                    x[...] = vector(world.rank, n, dtype)
                    total = CALLS[call](group, x, operation(op, x.dtype))
                    told = expected(world.size, n, dtype, op)
                    assert total.tobytes() == told.tobytes(), (n, dtype, op)

    ranks(body)
