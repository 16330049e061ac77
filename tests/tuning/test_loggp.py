"""Simulated schedules against the algorithms themselves on an ideal machine."""

from __future__ import annotations

import numpy as np
import pytest
from clocked import Machine, Takes, clocks, over_hosts

from hpctrain import collectives
from hpctrain.tuning.model import cost
from hpctrain.tuning.model.loggp import Clocks, Cluster, Wire, uniform_cluster
from hpctrain.tuning.model.message_schedules import SCHEDULES

INSIDE, BETWEEN = Wire(9e-7, 2e-7, 1e-7, 1e-10), Wire(5e-6, 4e-7, 9e-7, 8e-10)
EVEN = 8 * 2520  # bytes that divide by every P here
GAMMA = 3e-11

MESSAGES = [name for name in SCHEDULES if name not in ("direct", "hierarchical")]

#: (nodes of the ranks, how slow each is, when each starts)
PLACES = {
    "one rank": ([0], 1, 0),
    "one node": ([0] * 4, 1, 0),
    "two nodes": ([0, 0, 0, 1, 1, 1], 1, 0),
    "uneven nodes": ([0, 0, 0, 0, 1, 2, 2], 1, 0),
    "a slow rank": ([0, 1, 2, 3, 4], [1, 1, 7, 1, 1], 0),
    "late ranks": ([0, 1, 2], 1, [0, 3e-4, 1e-5]),
    "all at once": ([0, 0, 1, 1, 1, 2, 2, 2, 2], np.linspace(1, 3, 9), np.linspace(2e-4, 0, 9)),
}


@pytest.mark.parametrize("n", [EVEN, 120 * EVEN, 520 * EVEN], ids=["short", "segments", "long"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", MESSAGES)
def test_every_clock_is_that_of_the_ideal_machine(name, place, n):
    """With a card for every rank no wire is shared: then the ideal machine knows the time too."""
    nodes, slow, start = PLACES[place]
    replayed = Clocks(
        Cluster(INSIDE, BETWEEN, GAMMA, 1e-11, len(nodes)), np.array(nodes), start, slow
    )
    SCHEDULES[name](replayed, n)

    def wire(a, b):
        item = INSIDE if nodes[a] == nodes[b] else BETWEEN
        return Takes(item.latency, item.overhead, item.gap, item.seconds_per_byte)

    slow, start = (np.full(len(nodes), 1.0) * item for item in (slow, np.array(start)))
    machine = Machine(wire, GAMMA, lambda r: slow[r], lambda r: start[r])
    function = collectives.ALLREDUCE[name]
    result = clocks(
        lambda link, x, add: function(over_hosts(link, nodes), x, add), len(nodes), n, machine
    )
    np.testing.assert_allclose(replayed.now, result, rtol=1e-9)


@pytest.mark.parametrize("ranks", [2, 3, 8, 37, 64])
@pytest.mark.parametrize("name", MESSAGES)
def test_the_closed_forms(name, ranks):
    """Exact, but for trees in which what one child sends hides behind what another's is added."""
    machine, n = cost.Machine(2e-6, 3e-10, 7e-11), 64 * 37 * 8
    replayed = Clocks(uniform_cluster(machine), np.zeros(ranks, int))
    SCHEDULES[name](replayed, n)
    expected = machine.seconds(cost.ALLREDUCE[name](n, ranks))
    if name == "double-tree" or (name == "tree" and ranks & (ranks - 1)):
        assert 0.2 * expected < replayed.now.max() <= expected
    else:
        assert replayed.now.max() == pytest.approx(expected, rel=1e-9)


def test_ranks_of_a_node_share_its_cards():
    """Of 2 nodes with 4 ranks each, all exchange with the other node over 1, 2 or 8 cards."""
    nodes, ranks = np.arange(8) // 4, np.arange(8)
    chosen = []
    for cards in (1, 2, 8):
        replayed = Clocks(Cluster(INSIDE, Wire(0, 0, 0, 1), GAMMA, 0, cards), nodes)
        replayed.exchange(replayed.route(ranks, ranks ^ 4), 10)
        chosen.append(replayed.now.max())
    assert chosen == [40, 20, 10]


def test_a_port_is_not_shared_with_itself():
    """Two messages to one rank come one after the other: that is all."""
    replayed = Clocks(Cluster(INSIDE, Wire(0, 0, 0, 1), GAMMA, 0), np.arange(3))
    route = replayed.route(np.array([1, 2]), np.array([0, 0]))
    assert route.seconds_per_byte.tolist() == [1, 1]


def test_two_ways_at_once_may_take_longer():
    wire = Wire(0, 0, 0, 1, seconds_per_byte_duplex=3)
    alone, pair = (Clocks(Cluster(wire, wire, 0, 0), np.zeros(2, int)) for _ in range(2))
    alone.exchange(alone.route(np.array([0]), np.array([1])), 10)
    pair.exchange(pair.route(np.array([0, 1]), np.array([1, 0])), 10)
    assert (alone.now.max(), pair.now.max()) == (10, 30)


@pytest.mark.parametrize("ranks", [2, 5])
def test_direct_streams_its_bytes_through_memory(ranks):
    clocks_ = Clocks(Cluster(Wire(3, 1, 0, 0), BETWEEN, 0, 0.5), np.zeros(ranks, int))
    SCHEDULES["direct"](clocks_, 100)
    assert clocks_.now.tolist() == [2 * 5 + 0.5 * 2 * ranks * 100] * ranks


@pytest.mark.parametrize(("nodes", "lanes"), [([0, 0, 1, 1], 2), ([0, 1, 1, 1, 2, 2], 1)])
def test_hierarchical_is_memory_and_a_ring_of_nodes(nodes, lanes):
    """All rings share the card: together they take as long as one with the whole vector."""
    n, m, wire = 2520 * 8.0, 1e-3, Wire(1, 0, 1, 0.25)
    clocks_ = Clocks(Cluster(Wire(0, 0, 0, 0), wire, 0.5, m), np.array(nodes))
    SCHEDULES["hierarchical"](clocks_, n)
    count, maximum = max(nodes) + 1, max(np.bincount(nodes))
    ring = cost.Machine(1, 0.25 * lanes, 0.5).seconds(cost.ring(n / lanes, count))
    assert clocks_.now.max() == pytest.approx(ring + m * n * (maximum + 1 + 2 * (maximum - 1)))


@pytest.mark.parametrize("nodes", [np.arange(240) // 8, np.minimum(np.arange(240) // 9, 25)])
@pytest.mark.parametrize("latency", [0, 1e-3])
@pytest.mark.parametrize("n", [1e3, 6e8])
def test_a_jump_ends_where_steps_do(nodes, latency, n, monkeypatch):
    """A ring whose steps cost the same after a while, held up by its ports or by its latency."""
    cluster = Cluster(INSIDE, Wire(latency, 4e-7, 9e-7, 8e-10), GAMMA, 1e-11)
    jumps, steps = Clocks(cluster, nodes), Clocks(cluster, nodes)
    SCHEDULES["ring"](jumps, n)
    monkeypatch.setattr(Clocks, "repeat", _step_by_step)
    SCHEDULES["ring"](steps, n)
    np.testing.assert_allclose(jumps.now, steps.now, rtol=1e-9)


def _step_by_step(self, times, step, period=1, under_way=()):
    for _ in range(times):
        step()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*MESSAGES, "hierarchical"])
def test_65536_ranks(name):
    """A step taken alone, as often as a ring has steps, would take minutes: here, seconds."""
    calls = 0
    cluster = Cluster(INSIDE, BETWEEN, GAMMA, 1e-11)
    replayed = Clocks(cluster, np.arange(65536) // 8)
    exchange = replayed.exchange

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        exchange(*args, **kwargs)

    replayed.exchange = counted
    SCHEDULES[name](replayed, 64 << 20)
    floor = 2 * (64 << 20) * BETWEEN.seconds_per_byte * 65535 / 65536 / (1 if name == "ring" else 8)
    assert replayed.now.max() > floor
    assert calls < 200
