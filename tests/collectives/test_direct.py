"""The algorithm `direct`: arrays in any memory and of any length."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from cases import DTYPES, OPERATIONS, dtype_of, expected, length, vector
from ranks import THREAD_RANKS, on_ranks, run_on

from hpctrain.collectives import direct, operation
from hpctrain.collectives.direct import (
    _warn_of_messages,
    all_gather,
    bind_direct,
    direct_shared,
    part_offsets,
    reduce_scatter,
)
from hpctrain.core.errors import UsageError
from hpctrain.transport.shared_memory.host import NodeMemory
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

LENGTHS = ("0", "1", "P-1", "P", "P+1", "8", "5003", "40003", "300007")
OPS = [*OPERATIONS]
LONG = 100_000  # elements, of float64 several buffers
LONGEST = int(LENGTHS[-1])


def in_place(group, x, op):
    direct(group, x, op)
    return x


def twice(call, x):
    """Return what a bound call makes of `x`, the second time."""
    before = x.copy()
    call()
    x[...] = before
    return call()


def in_parts(group, x, op):
    own = reduce_scatter(group, x, op)
    assert own.size == np.diff(part_offsets(x, group.link.size))[group.link.rank]
    all_gather(group, x)
    return x


#: What is called, and on what: an array in node memory, one that no neighbour sees, or either.
CALLS = {
    "direct": in_place,
    "shared": direct_shared,
    "twice": lambda group, x, op: twice(bind_direct(group, x, op), x),
    "reduce-scatter, all-gather": in_parts,
}
ARRAYS = {
    "resident": lambda rank, observed, plain: observed[: plain.size],
    "plain": lambda rank, observed, plain: plain,
    "mixed": lambda rank, observed, plain: plain if rank else observed[: plain.size],
    "elsewhere": lambda rank, observed, plain: observed[rank % 2 * plain.size :][: plain.size],
}


def kinds(call: str, location: str, lengths: list[int], crossed) -> list[tuple[int, str, str]]:
    """Return the lengths, dtypes and operations that are tried: all where memory is read."""
    by_messages = CALLS[call] is in_parts and location != "resident"  # their dtypes: test_rooted.py
    short = [] if by_messages else [n for n in lengths if n < LONG]
    plain = [n for n in lengths if n not in short]
    begin = lengths[3] + [*CALLS].index(call) + [*ARRAYS].index(location)
    return [*crossed(short, DTYPES, OPS, begin=begin), *product(plain, ["float64"], OPS)]


@pytest.mark.sample(6)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("location", ARRAYS)
@on_ranks(*THREAD_RANKS[1:])
def test_exact_on_integers(ranks, call, location, crossed):
    """Every length, dtype and operation, to the last bit, and the same bytes on all ranks."""
    rows = kinds(call, location, [length(word, ranks.size) for word in LENGTHS], crossed)

    def body(world):
        group, memory = replace(world.main, spins=True), world.memory.zeros(2 * LONGEST, np.float64)
        for n, dtype, op in rows:
            observed = memory.view(dtype_of(dtype))
            x = ARRAYS[location](world.rank, observed, np.zeros(n, observed.dtype))
            group.link.barrier()  # nobody writes what others still read
            x[...] = vector(world.rank, n, dtype)
            total = CALLS[call](group, x, operation(op, x.dtype))
            reported = expected(world.size, n, dtype, op)
            assert total.tobytes() == reported.tobytes(), (n, dtype, op)

    ranks(body)


@on_ranks(3)
def test_lengths_that_differ(ranks):
    """An error on every rank that names the lengths, whichever way each would have gone."""

    def body(world):
        observed = world.memory.zeros(100_000, np.float32)
        for lengths in ((10, 10, 20), (10, 50_000, 10), (40_000, 50_000, 10)):
            x = observed[: lengths[world.rank]]
            with pytest.raises(UsageError) as error:
                direct(world.main, x if world.rank else x.copy(), np.add)
            for rank, n in enumerate(lengths):
                assert re.search(rf"{rank}[^;h]* ha(s|ve) an array of {4 * n} bytes", str(error))
            x[:] = 1
            direct(world.main, observed[:30_000], np.add)  # all may go on together

    ranks(body)


def test_several_nodes_are_refused():
    def body(link):
        with pytest.raises(UsageError, match="seen 2; use hierarchical"):
            direct(over_threads(link, "aab").main, np.zeros(5), np.add)

    run_ranks(3, body)


def test_without_node_memory_messages_do(caplog):
    _warn_of_messages.cache_clear()

    def body(world):
        group = replace(world.main, memory=NodeMemory(world.link, None, kinds=()))
        for _ in range(2):
            x = vector(world.rank, 5003, "int64").copy()
            assert CALLS["direct"](group, x, np.add) is x
            np.testing.assert_array_equal(x, expected(world.size, 5003, "int64", "sum"))
        assert group.bytes_sent > 0

    run_on("threads", 3, body)
    assert [r.getMessage().count("sends messages") for r in caplog.records] == [1]


@on_ranks(4)
def test_no_bytes_are_sent(ranks):
    def body(world):
        x, group = world.memory.zeros(50_000, np.float32), world.main
        direct(group, x, np.add)
        before = group.bytes_sent
        for array in (x, x.copy(), x[:10]):
            direct(group, array, np.add)
            direct_shared(group, array, np.add)
        assert group.bytes_sent == before

    ranks(body)
