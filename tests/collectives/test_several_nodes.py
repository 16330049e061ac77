"""All-reduces over several nodes: simulated hosts for ranks that are threads."""

from __future__ import annotations

import numpy as np
import pytest
from cases import DTYPES, OPERATIONS, dtype_of, expected, vector
from clocked import alike, clocks, over_hosts
from oracles.messages import MESSAGES, Call

from hpctrain.collectives import ALLREDUCE, all_gather_bytes, operation
from hpctrain.collectives.chunks import STREAM_SEGMENT_BYTES
from hpctrain.collectives.group import group_over_nodes
from hpctrain.collectives.ring import (
    RECEIVES_AHEAD,
    all_gather,
    reduce_scatter,
)
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.tuning.model import cost
from hpctrain.world import over_threads

#: The host of each rank.
HOSTS = {
    "one host": "aaa",
    "a rank each": "abcd",
    "two and two": "aabb",
    "in turn": "ababab",
    "uneven": "aaabb",
    "one alone": "aaab",
    "three hosts": "aabbbbc",
    "odd": "abcabca",
}
CALLS = {
    **{name: ALLREDUCE[name] for name in ("hierarchical", "ring", "double-tree")},
    "reduce-scatter": lambda group, x, op: reduce_scatter(group, x, op),
    "all-gather": lambda group, x, op: all_gather(group, x),
}
#: Elements of float64 in a segment of a stream; chunks of some of them.
SEGMENT = STREAM_SEGMENT_BYTES // 8
LENGTHS = (0, 1, 7, 10_007)


def long(ranks: int) -> list[int]:
    """Return lengths whose chunks are less, and more than thrice, as many segments as are ahead."""
    return [ranks * SEGMENT + 1, ranks * (3 * RECEIVES_AHEAD + 1) * SEGMENT - 3]


@pytest.mark.sample(3)
@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("location", ["node memory", "elsewhere"])
@pytest.mark.parametrize("name", ["hierarchical", "ring", "double-tree"])
def test_exact_on_integers(hosts, name, location, crossed):
    """Every dtype and operation where it is new, to the last bit; long vectors as float64."""
    size = len(hosts)
    rows = [(n, "float64", "sum") for n in long(size)]  # the second is the longest
    if name == "hierarchical":
        rows += crossed(LENGTHS, DTYPES, [*OPERATIONS], begin=size + len(location))

    def body(link):
        world = over_threads(link, hosts)
        make = world.memory.zeros if location == "node memory" else np.zeros
        memory = make(8 * rows[1][0], np.uint8)
        for n, dtype, op in rows:
            kind = dtype_of(dtype)
            x = memory[: n * kind.itemsize].view(kind)
            link.barrier()  # nobody writes what others still read
            x[...] = vector(link.rank, n, dtype)
            ALLREDUCE[name](world.main, x, operation(op, x.dtype))
            assert x.tobytes() == expected(size, n, dtype, op).tobytes(), (n, dtype, op)

    run_ranks(size, body)


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
def test_hierarchical_gives_all_ranks_the_same_bytes(hosts):
    """Also of sums that are rounded: within a unit per addition of the sum of magnitudes."""

    def body(link):
        values = [np.random.default_rng(r).standard_normal(30_007) for r in range(link.size)]
        x = values[link.rank].astype(np.float32)
        ALLREDUCE["hierarchical"](over_threads(link, hosts).main, x, np.add)
        assert len(set(all_gather_bytes(link, x.tobytes()))) == 1
        bound = link.size * 2.0**-24 * np.abs(values).sum(0)
        assert (np.abs(x - np.sum(values, 0)) <= bound).all()

    run_ranks(len(hosts), body)


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("name", CALLS)
def test_what_each_rank_sends(hosts, name):
    def body(link):
        group = group_over_nodes(link, hosts)
        for n in (*LENGTHS, *long(link.size)):
            before = (
                group.bytes_sent,
                sum(item.endpoint.traffic.messages_sent for item in group.links),
            )
            CALLS[name](group, np.zeros(n), np.add)
            messages = sum(item.endpoint.traffic.messages_sent for item in group.links) - before[1]
            sent = group.bytes_sent - before[0], messages
            reported = MESSAGES[name](Call(n, 8, link.size, link.rank, nodes=group.nodes))
            assert sent == (8 * sum(reported), len(reported)), n

    run_ranks(len(hosts), body)


def test_each_byte_crosses_a_nodes_link_as_seldom_as_can_be():
    """Two nodes of two: of the 3 n bytes that a flat ring's ranks send, a third less crosses."""
    crossed = {}
    for name in ("ring", "hierarchical"):
        call = [Call(8000, 8, 4, rank, nodes=((0, 1), (2, 3))) for rank in range(4)]
        if name == "ring":  # rank 1 sends to the other node, rank 0 to its neighbour
            crossed[name] = sum(MESSAGES[name](call[1]))
        else:
            inside = 2 * sum(MESSAGES["reduce-scatter"](Call(8000, 8, 2, 0)))
            crossed[name] = sum(sum(MESSAGES[name](item)) - inside for item in call[:2])
    assert crossed["ring"] == 1.5 * crossed["hierarchical"]


@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "aabbcc", "aaabbb", "abcd"])
@pytest.mark.parametrize("part", [(1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=["steps", "bytes", "added"])
def test_the_longest_path_of_hierarchical(hosts, part):
    n, size, nodes = 8 * 2520 * 8, len(hosts), len(set(hosts))
    machine = cost.Machine(*part)

    def body(link, x, add):
        ALLREDUCE["hierarchical"](over_hosts(link, hosts), x, add)

    result = max(clocks(body, size, n, alike(machine)))
    assert result == machine.seconds(cost.hierarchical(n, size, nodes))


def test_a_rank_that_fails_between_nodes_ends_the_others():
    def body(link):
        group = group_over_nodes(link, "abc")
        if link.rank == 1:
            raise ZeroDivisionError
        ALLREDUCE["ring"](group, np.zeros(long(3)[0]), np.add)

    with pytest.raises(ZeroDivisionError):
        run_ranks(3, body)
