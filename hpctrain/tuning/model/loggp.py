"""LogGP: the cost of messages, on one clock per rank, for all ranks at once.

A message of m bytes from rank a to rank b, over a wire with latency L, overhead o, gap g and G
seconds per byte (the gap per byte):

    a's processor  [ o ]
    a's port            [ .... m G .... | g ]             next message of a
    wire                                 ---- L ---->
    b's port                         [ .... m G .... | g ]     next message to b
    b's processor                                    [ o ][ m gamma ]   receives, then adds

A port handles one message at a time, so messages leave, and arrive, at intervals of g + m G. There
are two kinds of wires: inside a node and between nodes. Where k ranks of a node send (or receive)
between nodes in the same step, they share its network cards, and m G becomes k m G. A wire that is
slower in both directions at once has another G for steps in which its ends send and receive.

With L = g = alpha, o = 0 and G = beta this is the alpha-beta-gamma model of cost.py, exactly.

Source: Alexandrov, Ionescu, Schauser and Scheiman, "LogGP: incorporating long messages into the
LogP model", 1995.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

import numpy as np

from hpctrain.tuning.model import cost

Array = np.ndarray


@dataclass(frozen=True)
class Wire:
    """One kind of link: seconds, and seconds per byte."""

    latency: float  #: L
    overhead: float  #: o, of the processor, at either end
    gap: float  #: g, between two messages of one port
    seconds_per_byte: float  #: G
    #: G while the other direction is in use too; None: the same
    seconds_per_byte_duplex: float | None = None

    @property
    def duplex_seconds_per_byte(self) -> float:
        """G while the other way is in use too."""
        return (
            self.seconds_per_byte
            if self.seconds_per_byte_duplex is None
            else self.seconds_per_byte_duplex
        )


@dataclass(frozen=True)
class Cluster:
    """Wires inside a node and between nodes; seconds per byte that a rank adds or memory streams.

    `memory`: seconds per byte read or written by all cores of a node together: the floor.
    """

    inside: Wire
    between: Wire
    gamma: float
    memory: float
    cards: int = 1  #: network cards of a node


def uniform_cluster(machine: cost.Machine) -> Cluster:
    """Return the cluster on which every message costs the same as on `machine`."""
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
    seconds_per_byte: Array

    def select(self, mask: Array) -> Route:
        """Return the route of the `mask` messages, over the same wires."""
        return Route(*(getattr(self, column.name)[mask] for column in fields(self)))


@dataclass(frozen=True)
class Train:
    """Arrival times of messages that follow each other over each wire of a route.

    `port_times` is when the last message has left its sender's port.
    """

    first: Array
    interval: Array | float
    count: int
    nbytes: float
    port_times: Array = field(default_factory=lambda: np.zeros(0))


class Clocks:
    """The time on each rank's processor and on its two ports; `nodes[r]` is the node of rank r."""

    def __init__(
        self,
        cluster: Cluster,
        nodes: Array,
        start: Array | float = 0.0,
        slow_factors: Array | float = 1.0,
    ):
        """Start rank r at `start[r]`; its processor takes `slow[r]` times as long as others."""
        self.cluster, self.nodes, self.size = cluster, nodes, len(nodes)
        self.neighbours = np.bincount(nodes)[nodes]  #: ranks of each rank's node
        self.slow_factors = np.full(self.size, 1.0) * slow_factors
        self.now, self.send_port_free, self.receive_port_free = (
            np.full(self.size, 1.0) * start for _ in range(3)
        )

    def route(self, senders: Array, receivers: Array) -> Route:
        """Return the route of simultaneous messages: those between nodes share the cards."""
        a, b = self.nodes[senders], self.nodes[receivers]
        crosses_nodes = a != b
        duplex = (
            self._membership_mask(receivers)[senders] | self._membership_mask(senders)[receivers]
        )
        sender_share, receiver_share = (
            self._count_on_nodes(senders[crosses_nodes])[a],
            self._count_on_nodes(receivers[crosses_nodes])[b],
        )
        sharing_ranks = np.maximum(np.maximum(sender_share, receiver_share) / self.cluster.cards, 1)
        inside, between = self.cluster.inside, self.cluster.between
        seconds_per_byte = np.where(
            duplex,
            np.where(
                crosses_nodes, between.duplex_seconds_per_byte, inside.duplex_seconds_per_byte
            ),
            np.where(crosses_nodes, between.seconds_per_byte, inside.seconds_per_byte),
        )
        return Route(
            senders,
            receivers,
            np.where(crosses_nodes, between.latency, inside.latency),
            np.where(crosses_nodes, between.overhead, inside.overhead),
            np.where(crosses_nodes, between.gap, inside.gap),
            seconds_per_byte * np.where(crosses_nodes, sharing_ranks, 1),
        )

    def send(self, route: Route, nbytes: float, count: int = 1) -> Train:
        """Send `count` messages of `nbytes` one after the other, without waiting."""
        ranks, port_s = route.senders, route.gap + nbytes * route.seconds_per_byte
        overhead = route.overhead * self.slow_factors[ranks]
        first = np.maximum(self.now[ranks] + overhead, self.send_port_free[ranks]) + port_s
        interval = np.maximum(port_s, overhead)
        self.now[ranks] += count * overhead
        self.send_port_free[ranks] = port_times = first + (count - 1) * interval
        return Train(first - route.gap + route.latency, interval, count, nbytes, port_times)

    def receive(self, route: Route, train: Train, adds: bool = False) -> None:
        """Wait for each message of `train`, and add each on arrival.

        The last one is limited by the processor, the wire or the port.
        """
        ranks, later_messages = route.receivers, train.count - 1
        port_s = route.gap + train.nbytes * route.seconds_per_byte
        cpu_s = self.slow_factors[ranks] * (
            route.overhead + adds * train.nbytes * self.cluster.gamma
        )
        port_free = self.receive_port_free[ranks] + port_s
        self.now[ranks] = cpu_s + np.maximum.reduce(
            [
                self.now[ranks] + later_messages * cpu_s,
                train.first + later_messages * np.maximum(train.interval, cpu_s),
                port_free + later_messages * np.maximum(port_s, cpu_s),
            ]
        )
        self.receive_port_free[ranks] = np.maximum(
            train.first + later_messages * train.interval, port_free + later_messages * port_s
        )

    def wait_until_sent(self, ranks: Array | slice = slice(None)) -> None:
        """Wait until all messages of `ranks` have left their ports."""
        self.now[ranks] = np.maximum(self.now[ranks], self.send_port_free[ranks])

    def exchange(self, route: Route, nbytes: float, adds: bool = False) -> None:
        """Send and receive at once, wait for both, and only then add."""
        self.receive(route, self.send(route, nbytes))
        self.wait_until_sent(route.senders)
        if adds:
            self.now[route.receivers] += (
                nbytes * self.cluster.gamma * self.slow_factors[route.receivers]
            )

    def synchronize(self) -> None:
        """Synchronize the ranks of each node by flags, which are visible after a latency."""
        inside = self.cluster.inside
        flag_s = inside.latency + 2 * inside.overhead
        latest_of_node = np.full(int(self.nodes.max()) + 1, -np.inf)
        np.maximum.at(latest_of_node, self.nodes, self.now)
        self.now = latest_of_node[self.nodes] + np.where(self.neighbours > 1, flag_s, 0.0)

    def stream(self, nbytes: Array | float) -> None:
        """Advance all clocks: the ranks of rank r's node copy `nbytes[r]` bytes in all."""
        self.now = self.now + self.cluster.memory * nbytes * self.slow_factors

    def repeat(
        self,
        count: int,
        step: Callable[[], None],
        period: int = 1,
        in_flight: Iterable[Train] = (),
    ) -> None:
        """Call `step` `count` times, or until the remaining calls can be extrapolated.

        `in_flight` are messages that one step leaves to the next. All costs are sums and maxima of
        clocks. So once `period` steps have advanced their clocks by the same time twice, they will
        do so again: the rest is one jump.
        """
        last_changes = None
        while count >= period:
            previous_clocks = self._read_clocks()
            for _ in range(period):
                step()
            count -= period
            clock_changes = self._read_clocks() - previous_clocks
            if (
                last_changes is not None
                and _is_uniform(clock_changes)
                and np.allclose(clock_changes, last_changes, 1e-9, 0)
            ):
                self._advance(count // period * clock_changes, in_flight)
                count %= period
            last_changes = clock_changes
        for _ in range(count):
            step()

    def _membership_mask(self, ranks: Array) -> Array:
        """Return a mask over all ranks: membership in `ranks`."""
        mask = np.zeros(self.size, bool)
        mask[ranks] = True
        return mask

    def _count_on_nodes(self, ranks: Array) -> Array:
        """Return the number of `ranks` on each node: one rank has one port."""
        return np.bincount(self.nodes[self._membership_mask(ranks)], minlength=self.nodes.max() + 1)

    def _advance(self, duration: Array, in_flight: Iterable[Train]) -> None:
        self.now, self.send_port_free, self.receive_port_free = self._read_clocks() + duration
        for train in in_flight:
            train.first[:] += duration.max()
            train.port_times[:] += duration.max()

    def _read_clocks(self) -> Array:
        return np.stack([self.now, self.send_port_free, self.receive_port_free])


def _is_uniform(clock_changes: Array) -> bool:
    """Return whether all clocks that advanced did so by the same time, up to rounding."""
    clock_increments = clock_changes[clock_changes > 0]
    return not clock_increments.size or bool(
        np.ptp(clock_increments) <= 1e-9 * clock_increments.max()
    )
