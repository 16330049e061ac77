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

from hpctrain.collectives.chunks import SEGMENT_BYTES
from hpctrain.collectives.ring import RECEIVES_AHEAD, STREAM_BYTES
from hpctrain.cost_model.double_tree import double_tree, segments_of
from hpctrain.cost_model.loggp import Array, Clocks, Route, Train

Schedule = Callable[[Clocks, float], None]


def ring(clocks: Clocks, n: float) -> None:
    """Pass chunks of n/P round the ring, P - 1 times adding and P - 1 times as they are."""
    ranks = np.arange(clocks.size)
    period = int(clocks.neighbours.max())  # of the pattern of slow and fast wires
    _ring(clocks, clocks.route(ranks, np.roll(ranks, -1)), n / clocks.size, clocks.size, period)


def _ring(clocks: Clocks, route: Route, chunk: float, size: int, period: int) -> None:
    """Pass chunks round one ring, or several equal rings at once, of `size` ranks."""
    if clocks.nodes.max() > 0 and chunk > STREAM_BYTES:
        _stream(clocks, route, chunk, size, period)
        return
    add = _in_segments if chunk > SEGMENT_BYTES else _simultaneous_exchange
    clocks.repeat(size - 1, lambda: add(clocks, route, chunk), period)
    clocks.repeat(size - 1, lambda: clocks.exchange(route, chunk), period)


def _stream(clocks: Clocks, route: Route, chunk: float, size: int, period: int) -> None:
    """Forward each segment on arrival, with a few in flight."""
    lengths = list(segments(chunk, STREAM_BYTES))
    receives_ahead = min(RECEIVES_AHEAD, len(lengths))
    arriving, adds = deque[Train](), deque[bool]()

    def receive_segment() -> None:
        train = arriving.popleft()
        clocks.receive(route, train, adds.popleft())
        clocks.send_train(route, train)

    def forward_half(half: bool) -> None:
        for nbytes in lengths:
            if len(arriving) == receives_ahead:
                receive_segment()
            arriving.append(clocks.send(route, nbytes))
            adds.append(half)

    for half in (True, False):
        clocks.repeat(size - 1, partial(forward_half, half), period, arriving)
    while arriving:
        receive_segment()


def _simultaneous_exchange(clocks: Clocks, route: Route, chunk: float) -> None:
    clocks.exchange(route, chunk, adds=True)


def _in_segments(clocks: Clocks, route: Route, chunk: float) -> None:
    arriving: deque[Train] = deque()
    for nbytes in segments(chunk):
        if len(arriving) == RECEIVES_AHEAD:
            clocks.receive(route, arriving.popleft(), adds=True)
        arriving.append(clocks.send(route, nbytes))
    for train in arriving:
        clocks.receive(route, train, adds=True)
    clocks.sent()


def tree(clocks: Clocks, n: float) -> None:
    """Reduce up a binomial tree, then broadcast down the same edges, segment by segment."""
    edges = [_edges(clocks, 1 << k) for k in range((clocks.size - 1).bit_length())]
    child_routes = [clocks.route(child, parent) for child, parent in edges]
    parent_routes = [clocks.route(parent, child) for child, parent in reversed(edges)]
    _each_segment(clocks, n, lambda nbytes: _toward_root(clocks, child_routes, nbytes))
    _each_segment(clocks, n, lambda nbytes: _toward_leaves(clocks, parent_routes, nbytes))


def _edges(clocks: Clocks, bit: int) -> tuple[Array, Array]:
    children = np.arange(bit, clocks.size, 2 * bit)
    return children, children - bit


def _toward_root(clocks: Clocks, levels: list[Route], nbytes: float) -> None:
    for route in levels:
        clocks.receive(route, clocks.send(route, nbytes), adds=True)
        clocks.sent(route.senders)


def _toward_leaves(clocks: Clocks, levels: list[Route], nbytes: float) -> None:
    for route in levels:
        clocks.receive(route, clocks.send(route, nbytes))
    clocks.sent()


def recursive_doubling(clocks: Clocks, n: float) -> None:
    """Exchange whole vectors over distances 1, 2, 4, ..., segment by segment."""
    core, folded = _fold(clocks.size)
    folding_route, unfolding_route = (
        clocks.route(folded, folded - core),
        clocks.route(folded - core, folded),
    )
    partners = [_partners(clocks, 1 << k, core) for k in range(core.bit_length() - 1)]

    def double(nbytes: float) -> None:
        _one_message(clocks, folding_route, nbytes, adds=True)
        for route in partners:
            clocks.exchange(route, nbytes, adds=True)
        _one_message(clocks, unfolding_route, nbytes)

    _each_segment(clocks, n, double)


def halving_doubling(clocks: Clocks, n: float) -> None:
    """Exchange halves, quarters, ... and add them; then the same way back."""
    core, folded = _fold(clocks.size)
    folding_route, unfolding_route = (
        clocks.route(folded, folded - core),
        clocks.route(folded - core, folded),
    )
    if folded.size:
        _give_halves(clocks, (folding_route, unfolding_route), n / 2, adds=True)
        _one_message(clocks, folding_route, n / 2)
    partners = [_partners(clocks, 1 << k, core) for k in reversed(range(core.bit_length() - 1))]
    for k, route in enumerate(partners):
        _give_halves(clocks, (route,), n / 2 ** (k + 1), adds=True)
    for k, route in reversed(list(enumerate(partners))):
        _give_halves(clocks, (route,), n / 2 ** (k + 1), adds=False)
    _one_message(clocks, unfolding_route, n)


def _fold(size: int) -> tuple[int, Array]:
    """Return the largest power of two up to P, and the ranks beyond it."""
    core = 1 << (size.bit_length() - 1)
    return core, np.arange(core, size)


def _partners(clocks: Clocks, distance: int, core: int) -> Route:
    ranks = np.arange(core)
    return clocks.route(ranks, ranks ^ distance)


def _one_message(clocks: Clocks, route: Route, nbytes: float, adds: bool = False) -> None:
    """Send one message; its sender waits until it has left."""
    clocks.receive(route, clocks.send(route, nbytes), adds)
    clocks.sent(route.senders)


def _give_halves(clocks: Clocks, routes: tuple[Route, ...], nbytes: float, adds: bool) -> None:
    """Send a half in segments on each route, then receive segment by segment."""
    trains = [
        (route, clocks.send(route, length, count))
        for route in routes
        for length, count in segments_of(nbytes)
    ]
    for route, train in trains:
        clocks.receive(route, train, adds)
    for route in routes:
        clocks.sent(route.senders)


def _each_segment(clocks: Clocks, n: float, step: Callable[[float], None]) -> None:
    for length, count in segments_of(n):
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
    nodes, lanes = int(clocks.nodes.max()) + 1, int(clocks.neighbours.min())
    first = np.searchsorted(clocks.nodes, np.arange(nodes))
    ranks = np.add.outer(np.arange(lanes), first)
    route = clocks.route(ranks.ravel(), np.roll(ranks, -1, axis=1).ravel())
    _ring(clocks, route, n / lanes / nodes, nodes, 1)
    clocks.synchronize()
    clocks.stream(2 * n * (clocks.neighbours - 1))
    clocks.synchronize()


def segments(n: float, segment_bytes: int = SEGMENT_BYTES) -> Iterator[float]:
    """Yield the bytes of each segment of `n` bytes."""
    for length, count in segments_of(n, segment_bytes):
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
