"""LogGP: what a message costs, kept on a clock per rank, for all ranks at once.

A message of m bytes from rank a to rank b, over a wire with latency L, overhead o, gap g and G
seconds per byte (the gap per byte):

    a's processor  [ o ]
    a's port            [ .... m G .... | g ]             next message of a
    wire                                 ---- L ---->
    b's port                         [ .... m G .... | g ]     next message to b
    b's processor                                    [ o ][ m gamma ]   receives, then adds

A port is busy with one message at a time, so messages leave g + m G apart; and so they enter. There
are two kinds of wires: inside a node and between nodes. Where k ranks of a node send (or receive)
between nodes in the same step, they share its network cards, and m G becomes k m G. A wire whose
two ways hinder each other has another G for steps in which its ends send and receive at once.

With L = g = alpha, o = 0 and G = beta this is the alpha-beta-gamma model of cost.py, exactly.

Source: Alexandrov, Ionescu, Schauser and Scheiman, "LogGP: incorporating long messages into the
LogP model", 1995.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

import numpy as np

from hpctrain.tuning import cost

Array = np.ndarray


@dataclass(frozen=True)
class Wire:
    """One kind of link: seconds, and seconds per byte."""

    latency: float  #: L
    overhead: float  #: o, of the processor, at either end
    gap: float  #: g, between two messages of one port
    per_byte: float  #: G
    both_ways: float | None = None  #: G while the other way is in use too; None: the same

    @property
    def per_byte_both(self) -> float:
        """G while the other way is in use too."""
        return self.per_byte if self.both_ways is None else self.both_ways


@dataclass(frozen=True)
class Cluster:
    """Wires inside a node and between nodes; seconds per byte that a rank adds or memory streams.

    `memory` is what all cores of a node reach together, one byte read or written: the floor.
    """

    inside: Wire
    between: Wire
    gamma: float
    memory: float
    cards: int = 1  #: network cards of a node


def alike(machine: cost.Machine) -> Cluster:
    """Return the cluster on which every message costs what it costs on `machine`."""
    wire = Wire(machine.alpha, 0.0, machine.alpha, machine.beta)
    return Cluster(wire, wire, machine.gamma, machine.gamma / 3)  # adding: two reads, one write


@dataclass(frozen=True)
class Route:
    """Messages that travel in one step: senders[i] -> receivers[i], each over its own wire."""

    senders: Array
    receivers: Array
    latency: Array
    overhead: Array
    gap: Array
    per_byte: Array

    def part(self, chosen: Array) -> Route:
        """Return the messages that are `chosen`, over the same wires."""
        return Route(*(getattr(self, one.name)[chosen] for one in fields(self)))


@dataclass(frozen=True)
class Train:
    """Messages that follow each other over each wire of a route: when they arrive.

    `out` is when the last one has left its sender's port.
    """

    first: Array
    interval: Array | float
    count: int
    nbytes: float
    out: Array = field(default_factory=lambda: np.zeros(0))


class Clocks:
    """The time on each rank's processor and on its two ports; `nodes[r]` is the node of rank r."""

    def __init__(
        self, cluster: Cluster, nodes: Array, start: Array | float = 0.0, slow: Array | float = 1.0
    ):
        """Start rank r at `start[r]`; its processor takes `slow[r]` times as long as others."""
        self.cluster, self.nodes, self.size = cluster, nodes, len(nodes)
        self.neighbours = np.bincount(nodes)[nodes]  #: ranks of each rank's node
        self.slow = np.full(self.size, 1.0) * slow
        self.now, self.out_free, self.in_free = (np.full(self.size, 1.0) * start for _ in range(3))

    def route(self, senders: Array, receivers: Array) -> Route:
        """Return the route of messages that go at once: those between nodes share the cards."""
        a, b = self.nodes[senders], self.nodes[receivers]
        crosses = a != b
        both = self._are(receivers)[senders] | self._are(senders)[receivers]
        out, into = self._at_work(senders[crosses])[a], self._at_work(receivers[crosses])[b]
        sharing = np.maximum(np.maximum(out, into) / self.cluster.cards, 1)
        near, far = self.cluster.inside, self.cluster.between
        per_byte = np.where(
            both,
            np.where(crosses, far.per_byte_both, near.per_byte_both),
            np.where(crosses, far.per_byte, near.per_byte),
        )
        return Route(
            senders,
            receivers,
            np.where(crosses, far.latency, near.latency),
            np.where(crosses, far.overhead, near.overhead),
            np.where(crosses, far.gap, near.gap),
            per_byte * np.where(crosses, sharing, 1),
        )

    def send(self, route: Route, nbytes: float, count: int = 1) -> Train:
        """Let `count` messages of `nbytes` leave one after the other; wait for none."""
        who, takes = route.senders, route.gap + nbytes * route.per_byte
        overhead = route.overhead * self.slow[who]
        first = np.maximum(self.now[who] + overhead, self.out_free[who]) + takes
        interval = np.maximum(takes, overhead)
        self.now[who] += count * overhead
        self.out_free[who] = out = first + (count - 1) * interval
        return Train(first - route.gap + route.latency, interval, count, nbytes, out)

    def receive(self, route: Route, train: Train, adds: bool = False) -> None:
        """Wait for each message of `train`, and add each when it is in.

        Each of three may be what holds the last one up: the processor, the wire, the port.
        """
        who, more = route.receivers, train.count - 1
        takes = route.gap + train.nbytes * route.per_byte
        works = self.slow[who] * (route.overhead + adds * train.nbytes * self.cluster.gamma)
        port = self.in_free[who] + takes
        self.now[who] = works + np.maximum.reduce(
            [
                self.now[who] + more * works,
                train.first + more * np.maximum(train.interval, works),
                port + more * np.maximum(takes, works),
            ]
        )
        self.in_free[who] = np.maximum(train.first + more * train.interval, port + more * takes)

    def sent(self, who: Array | slice = slice(None)) -> None:
        """Wait until all that ranks `who` have sent is out."""
        self.now[who] = np.maximum(self.now[who], self.out_free[who])

    def out(self, route: Route, train: Train) -> None:
        """Let the senders of `train` wait until it is out."""
        self.now[route.senders] = np.maximum(self.now[route.senders], train.out)

    def exchange(self, route: Route, nbytes: float, adds: bool = False) -> None:
        """Send and receive at once, wait for both, and only then add."""
        self.receive(route, self.send(route, nbytes))
        self.sent(route.senders)
        if adds:
            self.now[route.receivers] += nbytes * self.cluster.gamma * self.slow[route.receivers]

    def meet(self) -> None:
        """Let the ranks of each node wait for each other: flags that are seen after a latency."""
        inside = self.cluster.inside
        works = inside.latency + 2 * inside.overhead
        latest = np.full(int(self.nodes.max()) + 1, -np.inf)
        np.maximum.at(latest, self.nodes, self.now)
        self.now = latest[self.nodes] + np.where(self.neighbours > 1, works, 0.0)

    def stream(self, nbytes: Array | float) -> None:
        """Let all ranks of rank r's node read or write `nbytes[r]` bytes together."""
        self.now = self.now + self.cluster.memory * nbytes * self.slow

    def repeat(
        self,
        times: int,
        step: Callable[[], None],
        period: int = 1,
        under_way: Iterable[Train] = (),
    ) -> None:
        """Call `step` `times` times, or as often as it takes to know what the rest will do.

        `under_way` are messages that one step leaves to the next. All costs are sums and maxima of
        clocks. So once `period` steps have moved all clocks that they move by the same time, twice,
        they will move them so again: the rest is one jump.
        """
        last = None
        while times >= period:
            before = self._state()
            for _ in range(period):
                step()
            times -= period
            moved = self._state() - before
            if last is not None and _uniform(moved) and np.allclose(moved, last, 1e-9, 0):
                self._jump(times // period * moved, under_way)
                times %= period
            last = moved
        for _ in range(times):
            step()

    def _are(self, who: Array) -> Array:
        """Return for each rank whether it is one of `who`."""
        found = np.zeros(self.size, bool)
        found[who] = True
        return found

    def _at_work(self, who: Array) -> Array:
        """Return for each node how many of its ranks are among `who`: one rank has one port."""
        return np.bincount(self.nodes[self._are(who)], minlength=self.nodes.max() + 1)

    def _jump(self, by: Array, under_way: Iterable[Train]) -> None:
        self.now, self.out_free, self.in_free = self._state() + by
        for train in under_way:
            train.first[:] += by.max()
            train.out[:] += by.max()

    def _state(self) -> Array:
        return np.stack([self.now, self.out_free, self.in_free])


def _uniform(moved: Array) -> bool:
    """Return whether all clocks that moved did so by the same time, but for rounding."""
    some = moved[moved > 0]
    return not some.size or bool(np.ptp(some) <= 1e-9 * some.max())
