"""Flags: no rank passes before all have arrived, and all see every earlier write."""

from __future__ import annotations

import itertools
import platform

import numpy as np
import pytest
from ranks import on_ranks, run_on

from hpctrain.core.errors import HungError
from hpctrain.transport.shared_memory import flags
from hpctrain.transport.shared_memory.flags import NodeCounters, NodeFlags, words_needed
from hpctrain.transport.threads.ranks import run_ranks

WAYS = list(itertools.product([True, False], [True, False]))  # spins, fenced
ROUNDS = 300


def flags_of(world, spins=True, fenced=True):
    """Return flags in node memory; and an array of all ranks' beside them."""
    words = world.memory.common_zeros(words_needed(world.size), np.uint64)
    return NodeFlags(world.main.node, words, spins, fenced)


@on_ranks(2, 3, 4, 9)
@pytest.mark.parametrize("spins, fenced", WAYS)
def test_all_see_what_all_said_and_wrote(ranks, spins, fenced):
    """One exchange a round, with an array that is written in turns: no race may be seen."""

    def body(world):
        node_flags = flags_of(world, spins, fenced)
        arrays = world.memory.neighbours(world.memory.zeros(2 * 512, np.int64))
        own = arrays[world.rank]
        for i in range(ROUNDS):
            at = slice(i % 2 * 512, i % 2 * 512 + 512)  # the other half may still be read
            own[at] = i * world.rank
            assert node_flags.exchange(i + world.rank) == [i + r for r in range(world.size)]
            for rank, array in enumerate(arrays):
                assert (array[at] == i * rank).all()

    ranks(body)


@on_ranks(2, 3)
@pytest.mark.parametrize("fenced", [True, False])
def test_who_reads_a_count_sees_what_was_written_before(ranks, fenced):
    """One rank writes two slots in turns, each once all others have counted it as read."""

    def body(world):
        words = world.memory.common_zeros(8 * (1 + world.size), np.uint64)
        slots = world.memory.common_zeros(2 * 512, np.int64).reshape(2, 512)
        counters, wait_for = NodeCounters(words, fenced), world.link.endpoint.waits.wait_for
        others = range(1, world.size)
        for i in range(ROUNDS):
            if world.rank == 0:
                wait_for(lambda i=i: all(counters.read(1 + r) >= i - 1 for r in others), b"free")
                slots[i % 2] = i
                counters.write(0, i + 1)
            else:
                wait_for(lambda i=i: counters.read(0) > i, b"filled")
                assert (slots[i % 2] == i).all()
                counters.write(1 + world.rank, i + 1)

    ranks(body)


@on_ranks(3)
@pytest.mark.parametrize("spins, fenced", WAYS)
def test_who_disagrees_is_heard_by_all(ranks, spins, fenced):
    def body(world):
        node_flags = flags_of(world, spins, fenced)
        # On past the end of the counter.
        node_flags.next_head = flags.PAYLOAD_MASK - 5 << flags.ROUND_BITS
        for i in range(12):
            odd = i % 4  # 3: nobody
            assert node_flags.agree(int(world.rank == odd)) == (odd == 3)

    ranks(body)


@pytest.mark.parametrize("spins", [True, False])
def test_who_never_comes_is_not_waited_for_for_ever(spins):
    def body(link):
        from hpctrain.world import over_threads

        node_flags = flags_of(over_threads(link), spins)
        if link.rank == 0:
            node_flags.agree()

    with pytest.raises(HungError, match=r"rank 0: (a collective|barrier): nothing for 0.3 s"):
        run_ranks(2, body, timeout_s=0.3)


def test_words_are_cache_lines_of_their_own():
    def body(world):
        node_flags = flags_of(world)
        address = np.asarray(node_flags._words).ctypes.data
        return address % 64, node_flags._offsets

    (start, places), *rest = run_on("threads", 4, body)
    assert start == 0
    assert [places] * 3 == [other for _, other in rest]
    assert len({8 * at // 64 for at in itertools.chain(*places)}) == 8
    assert (platform.machine() != "x86_64") == flags.NEEDS_FENCE
