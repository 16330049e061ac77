"""The vote: all ranks get the maxima, by flags in a node, by messages between nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ranks import THREAD_RANKS, on_ranks

from hpctrain.collectives.vote import elementwise_maximum
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads


def votes(group):
    rank, size = group.link.rank, group.link.size
    for i in range(20):
        subject = i % size
        assert elementwise_maximum(group, (int(rank == subject), rank + 1)) == [1, size]
        assert elementwise_maximum(group, (rank == subject and 65535, 0)) == [65535, 0]
    return group.bytes_sent


@on_ranks(*THREAD_RANKS)
@pytest.mark.parametrize("spins", [True, False])
def test_on_one_node(ranks, spins):
    def body(world):
        group = replace(world.main, spins=spins)
        votes(group)
        before = group.bytes_sent
        assert votes(group) == before  # no messages

    ranks(body)


@pytest.mark.parametrize("hosts", ["aabb", "aaabb"])
def test_on_several_nodes(hosts):
    def body(link):
        assert votes(over_threads(link, hosts).main) > 0

    run_ranks(len(hosts), body)
