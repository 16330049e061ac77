"""The message schedules of the all-reduces, replayed on clocks: sends, receives and waits.

Each function replays on `Clocks` the messages of its namesake in hpctrain/collectives/, for all P
ranks at once: one vector operation in place of P messages. Chunks count as equal (they differ by
an element at most). On the machine of cost.py the last clock equals the closed forms. With equal
ranks per node, and none slow, all steps of a ring soon cost the same: `Clocks.repeat` then jumps,
so that 65,536 ranks take seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from hpctrain.collectives.chunks import SEGMENT_BYTES, STREAM_SEGMENT_BYTES
from hpctrain.collectives.ring import RECEIVES_AHEAD
from hpctrain.tuning.model.double_tree import count_segments, double_tree
from hpctrain.tuning.model.loggp import Clocks, Route, Train

Schedule = Callable[[Clocks, float], None]


def ring(clocks: Clocks, n: float) -> None:
    """Pass chunks of n/P round the ring, P - 1 times adding and P - 1 times as they are."""
    ranks = np.arange(clocks.size)
    period = int(clocks.neighbours.max())  # of the pattern of slow and fast wires
    _pass_round_ring(
        clocks, clocks.route(ranks, np.roll(ranks, -1)), n / clocks.size, clocks.size, period
    )


def _pass_round_ring(clocks: Clocks, route: Route, chunk: float, size: int, period: int) -> None:
    """Pass chunks round one ring, or several equal rings at once, of `size` ranks."""
    if clocks.nodes.max() > 0 and chunk > STREAM_SEGMENT_BYTES:
        _stream_segments(clocks, route, chunk, size, period)
        return
    if chunk > SEGMENT_BYTES:
        clocks.repeat(size - 1, lambda: _exchange_in_segments(clocks, route, chunk), period)
    else:
        clocks.repeat(size - 1, lambda: clocks.exchange(route, chunk, adds=True), period)
    clocks.repeat(size - 1, lambda: clocks.exchange(route, chunk), period)


def _stream_segments(clocks: Clocks, route: Route, chunk: float, size: int, period: int) -> None:
    """Forward each segment on arrival, with a few in flight."""
    segment_sizes = list(segment_lengths(chunk, STREAM_SEGMENT_BYTES))
    receives_ahead = min(RECEIVES_AHEAD, len(segment_sizes))
    arriving_trains, add_flags = deque[Train](), deque[bool]()

    def receive_segment() -> None:
        train = arriving_trains.popleft()
        clocks.receive(route, train, add_flags.popleft())
        # Its senders wait until it has left their ports.
        clocks.now[route.senders] = np.maximum(clocks.now[route.senders], train.port_times)

    def forward_half(adds: bool) -> None:
        for nbytes in segment_sizes:
            if len(arriving_trains) == receives_ahead:
                receive_segment()
            arriving_trains.append(clocks.send(route, nbytes))
            add_flags.append(adds)

    for half in (True, False):
        clocks.repeat(size - 1, partial(forward_half, half), period, arriving_trains)
    while arriving_trains:
        receive_segment()


def _exchange_in_segments(clocks: Clocks, route: Route, chunk: float) -> None:
    arriving_trains: deque[Train] = deque()
    for nbytes in segment_lengths(chunk):
        if len(arriving_trains) == RECEIVES_AHEAD:
            clocks.receive(route, arriving_trains.popleft(), adds=True)
        arriving_trains.append(clocks.send(route, nbytes))
    for train in arriving_trains:
        clocks.receive(route, train, adds=True)
    clocks.wait_until_sent()


def tree(clocks: Clocks, n: float) -> None:
    """Reduce up a binomial tree, then broadcast down the same edges, segment by segment."""
    bits = [1 << k for k in range((clocks.size - 1).bit_length())]
    levels = [(np.arange(bit, clocks.size, 2 * bit), bit) for bit in bits]
    child_routes = [clocks.route(children, children - bit) for children, bit in levels]
    parent_routes = [clocks.route(children - bit, children) for children, bit in reversed(levels)]

    def send_toward_root(nbytes: float) -> None:
        for route in child_routes:
            _send_message(clocks, route, nbytes, adds=True)

    def send_toward_leaves(nbytes: float) -> None:
        for route in parent_routes:
            clocks.receive(route, clocks.send(route, nbytes))
        clocks.wait_until_sent()

    _repeat_for_segments(clocks, n, send_toward_root)
    _repeat_for_segments(clocks, n, send_toward_leaves)


def recursive_doubling(clocks: Clocks, n: float) -> None:
    """Exchange whole vectors over distances 1, 2, 4, ..., segment by segment."""
    core_size, folding_route, unfolding_route = _fold_ranks(clocks)
    partner_routes = [
        _partner_route(clocks, 1 << k, core_size) for k in range(core_size.bit_length() - 1)
    ]

    def exchange_segment(nbytes: float) -> None:
        _send_message(clocks, folding_route, nbytes, adds=True)
        for route in partner_routes:
            clocks.exchange(route, nbytes, adds=True)
        _send_message(clocks, unfolding_route, nbytes)

    _repeat_for_segments(clocks, n, exchange_segment)


def halving_doubling(clocks: Clocks, n: float) -> None:
    """Exchange halves, quarters, ... and add them; then the same way back."""
    core_size, folding_route, unfolding_route = _fold_ranks(clocks)
    if folding_route.senders.size:
        _send_halves(clocks, (folding_route, unfolding_route), n / 2, adds=True)
        _send_message(clocks, folding_route, n / 2)
    partner_routes = [
        _partner_route(clocks, 1 << k, core_size)
        for k in reversed(range(core_size.bit_length() - 1))
    ]
    for k, route in enumerate(partner_routes):
        _send_halves(clocks, (route,), n / 2 ** (k + 1), adds=True)
    for k, route in reversed(list(enumerate(partner_routes))):
        _send_halves(clocks, (route,), n / 2 ** (k + 1), adds=False)
    _send_message(clocks, unfolding_route, n)


def _fold_ranks(clocks: Clocks) -> tuple[int, Route, Route]:
    """Return the largest power of two up to P, and the routes from and to the ranks beyond it."""
    core_size = 1 << (clocks.size.bit_length() - 1)
    folded = np.arange(core_size, clocks.size)
    partners = folded - core_size
    return core_size, clocks.route(folded, partners), clocks.route(partners, folded)


def _partner_route(clocks: Clocks, distance: int, core_size: int) -> Route:
    ranks = np.arange(core_size)
    return clocks.route(ranks, ranks ^ distance)


def _send_message(clocks: Clocks, route: Route, nbytes: float, adds: bool = False) -> None:
    """Send one message; its sender waits until it has left."""
    clocks.receive(route, clocks.send(route, nbytes), adds)
    clocks.wait_until_sent(route.senders)


def _send_halves(clocks: Clocks, routes: tuple[Route, ...], nbytes: float, adds: bool) -> None:
    """Send a half in segments on each route, then receive segment by segment."""
    trains = [
        (route, clocks.send(route, length, count))
        for route in routes
        for length, count in count_segments(nbytes)
    ]
    for route, train in trains:
        clocks.receive(route, train, adds)
    for route in routes:
        clocks.wait_until_sent(route.senders)


def _repeat_for_segments(clocks: Clocks, n: float, step: Callable[[float], None]) -> None:
    for length, count in count_segments(n):
        clocks.repeat(count, lambda length=length: step(length))  # type: ignore[misc]


def direct(clocks: Clocks, n: float) -> None:
    """Sum out of all neighbours' memory and write back: 2Pn bytes on one node, which has all P."""
    clocks.synchronize()
    clocks.stream(2 * n * clocks.neighbours)
    clocks.synchronize()


def hierarchical(clocks: Clocks, n: float) -> None:
    """Sum in each node's memory, pass the sum round rings between nodes, write it to all.

    One ring per local rank, for its part of the vector; as many as the smallest node has ranks.
    """
    clocks.synchronize()
    clocks.stream(n * (clocks.neighbours + 1))
    clocks.synchronize()
    nodes, rails = int(clocks.nodes.max()) + 1, int(clocks.neighbours.min())
    first_ranks = np.searchsorted(clocks.nodes, np.arange(nodes))
    ranks = np.add.outer(np.arange(rails), first_ranks)
    route = clocks.route(ranks.ravel(), np.roll(ranks, -1, axis=1).ravel())
    _pass_round_ring(clocks, route, n / rails / nodes, nodes, 1)
    clocks.synchronize()
    clocks.stream(2 * n * (clocks.neighbours - 1))
    clocks.synchronize()


def segment_lengths(n: float, segment_bytes: int = SEGMENT_BYTES) -> Iterator[float]:
    """Yield the bytes of each segment of `n` bytes."""
    for length, count in count_segments(n, segment_bytes):
        yield from [length] * count


#: By name of the algorithm.
SCHEDULES: dict[str, Schedule] = {
    "ring": ring,
    "tree": tree,
    "double-tree": double_tree,
    "recursive-doubling": recursive_doubling,
    "halving-doubling": halving_doubling,
    "direct": direct,
    "hierarchical": hierarchical,
}
