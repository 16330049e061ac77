"""Measures alpha, beta and gamma of this machine, the constants of the cost model.

    alpha   half a ping-pong of 8 bytes                  rank a  -- 8 B ->  b
                                                                <- 8 B --
    beta    a stream one way, in segments of 1 MiB       rank a  = = = = >  b, then 8 B back
    gamma   all ranks stream a += b over private arrays, too long for the caches

For arrays of the host, or of GPUs, whose messages then take their own paths.
Between the first two ranks of a node and between the first ranks of two nodes; all others wait.
Each is the median over rounds; a round is several calls. measure.py has the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import numpy as np

from hpctrain.collectives import Group
from hpctrain.collectives.chunks import SEGMENT_BYTES
from hpctrain.core.xp import Array
from hpctrain.transport.link import Link, wait_all
from hpctrain.tuning.measure import ping_pong, time_calls
from hpctrain.tuning.model.cost import Machine

PING_PONGS, SEGMENT_COUNT = 200, 16
ADDED_BYTES = 16 << 20


Pair = tuple[int, int]


def measure_constants(
    group: Group, rounds: int, xp: ModuleType = np
) -> tuple[Machine | None, Machine | None]:
    """Return (inside a node, between nodes), None without such a pair; collective.

    `xp`: the module of the arrays, numpy or cupy.
    """
    gamma, (node_pair, network_pair) = _measure_gamma(group.link, rounds, xp), measured_pairs(group)
    return (
        _measure_pair(group.link, node_pair, gamma, rounds, xp) if node_pair else None,
        _measure_pair(group.link, network_pair, gamma, rounds, xp) if network_pair else None,
    )


def measured_pairs(group: Group) -> tuple[Pair | None, Pair | None]:
    """Return two ranks of one node, and two of different nodes; None if there are none."""
    nodes = group.nodes or (tuple(range(group.link.size)),)
    node_pair = next(((ranks[0], ranks[1]) for ranks in nodes if len(ranks) > 1), None)
    return node_pair, (nodes[0][0], nodes[1][0]) if len(nodes) > 1 else None


def _measure_pair(link: Link, pair: Pair, gamma: float, rounds: int, xp: ModuleType) -> Machine:
    a, b = pair
    short_message, segments = xp.zeros(1), xp.ones((SEGMENT_COUNT, SEGMENT_BYTES), np.uint8)
    alpha = _median_seconds(link, _ping_pong(link, a, b, short_message), rounds, short_message) / (
        2 * PING_PONGS
    )
    stream_s = _median_seconds(
        link, _stream_segments(link, a, b, segments, short_message), rounds, short_message
    )
    beta = max(stream_s - (SEGMENT_COUNT + 1) * alpha, stream_s / 10) / (
        SEGMENT_COUNT * SEGMENT_BYTES
    )
    return Machine(alpha, beta, gamma)


def _ping_pong(link: Link, a: int, b: int, short_message: Array) -> Callable[[], None]:
    if link.rank not in (a, b):
        return _do_nothing
    is_first = link.rank == a
    return partial(ping_pong, link, b if is_first else a, short_message, PING_PONGS, is_first)


def _stream_segments(
    link: Link, a: int, b: int, segments: Array, short_message: Array
) -> Callable[[], None]:
    def send_all() -> None:
        wait_all([link.isend(segment, b) for segment in segments])
        link.irecv(short_message, b).wait()

    def receive_all() -> None:
        wait_all([link.irecv(segment, a) for segment in segments])
        link.isend(short_message, a).wait()

    return {a: send_all, b: receive_all}.get(link.rank, _do_nothing)


def _measure_gamma(link: Link, rounds: int, xp: ModuleType) -> float:
    a, b = xp.ones(ADDED_BYTES // 4, np.float32), xp.zeros(ADDED_BYTES // 4, np.float32)
    b.fill(0)  # untouched pages all map to one page, which stays in the cache
    return _median_seconds(link, lambda: np.add(a, b, out=a), rounds, a) / ADDED_BYTES


def _median_seconds(
    link: Link, function: Callable[[], object], rounds: int, memory: Array
) -> float:
    function()
    return float(np.median([time_calls(link, function, memory=memory) for _ in range(rounds)]))


def _do_nothing() -> None:
    """Do nothing; the clock waits for the pair."""
