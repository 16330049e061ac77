"""Matching of collective calls: if one rank calls differently, or cannot call, all ranks raise."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from ranks import on_ranks

from hpctrain.collectives.signature import (
    fault_signature,
    length_signature,
    make_signature,
    must_match,
)
from hpctrain.collectives.small_messages import reduce_to_maximum
from hpctrain.core.errors import UsageError
from hpctrain.transport.shared_memory.host import NodeMemory
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

CALL, OTHER, FAULT = (
    make_signature("one call"),
    make_signature("another"),
    fault_signature("no array"),
)
#: hosts of the ranks, by which they make up nodes
HOSTS = ("aaa", "aab", "aabb", "abab", "aaabc", "abcde", "aabbccd")


def refused(group, call):
    with pytest.raises(UsageError) as error:
        must_match(group, call)
    return str(error.value)


def everything(group):
    """Try each rank as the one that differs; all that follows finds ranks in step."""
    size, rank = group.link.size, group.link.rank
    for culprit in range(size):
        must_match(group, CALL)
        reported = refused(group, OTHER if rank == culprit else CALL)
        assert reported.startswith("shape, dtype and call must be the same on all ranks; ")
        assert f"rank {culprit} has another" in reported
        reported = refused(group, FAULT if rank == culprit else CALL)
        assert reported == f"rank {culprit}: no array"
        calls = [make_signature(f"call {r}") for r in range(size)]
        if size > 2:
            assert f"rank {size - 1} has call {size - 1}" in refused(group, calls[rank])
    assert refused(group, FAULT) == "no array"
    must_match(group, CALL)


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("shares", [True, False])
def test_on_nodes(hosts, shares):
    """Between nodes the leaders alone send, 16 bytes to each partner."""
    nodes = len(set(hosts))

    def body(link):
        group = over_threads(link, hosts).main
        if not shares:
            group = replace(group, memory=NodeMemory(group.node, None, kinds=()))
        must_match(group, CALL)
        before = [item.endpoint.traffic.messages_sent for item in group.links], group.bytes_sent
        must_match(group, CALL)
        sent = [
            item.endpoint.traffic.messages_sent - n
            for item, n in zip(group.links, before[0], strict=True)
        ]
        leads = nodes > 1 and group.node.rank == 0
        if shares:
            assert sum(sent) == (math.ceil(math.log2(nodes)) if leads else 0)
        assert group.bytes_sent - before[1] == 16 * sum(sent)
        everything(group)

    run_ranks(len(hosts), body, timeout_s=20)


@on_ranks(2, 3, 4, mpi=(2, 3, 4, 5))
def test_in_a_node(ranks):
    """Also with the spinning of real ranks, and alone by messages."""

    def body(world):
        everything(world.main)
        everything(replace(world.main, memory=NodeMemory(world.link, None, kinds=())))

    ranks(body)


@on_ranks(1, 2, 3, 5, 8, mpi=(3, 4))
def test_maximum(ranks):
    def body(world):
        for culprit in range(world.size):
            numbers = np.array([world.rank == culprit, world.rank], np.uint64)
            reduce_to_maximum(world.link, numbers)
            assert numbers.tolist() == [1, world.size - 1]

    ranks(body)


def test_signatures_differ():
    texts = [f"allreduce sum auto of float32 ({n},)" for n in range(10_000)]
    assert len({make_signature(text).payload for text in texts}) == len(texts)
    assert fault_signature(texts[0]).digest != make_signature(texts[0]).digest
    assert length_signature(4) != length_signature(4, True)
