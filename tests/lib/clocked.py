"""An ideal machine with clocks: links on which messages take the time that LogGP predicts.

Every rank runs the real algorithm on real data, in a thread; only its clock is not real. A rank
sends one message and receives one at a time, both at once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hpctrain.collectives import Group
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.tuning.model import cost


class Takes(NamedTuple):
    """What one message of LogGP takes: seconds, and seconds per byte."""

    latency: float
    overhead: float
    gap: float
    seconds_per_byte: float


class Machine(NamedTuple):
    """Wires by their two ends; seconds per byte added; how slow each rank is and when it starts."""

    wire: Callable[[int, int], Takes]
    gamma: float
    slow: Callable[[int], float] = lambda rank: 1.0
    start: Callable[[int], float] = lambda rank: 0.0


def alike(machine: cost.Machine) -> Machine:
    """Return the machine of the alpha-beta-gamma model."""
    takes = Takes(machine.alpha, 0.0, machine.alpha, machine.beta)
    return Machine(lambda a, b: takes, machine.gamma)


class Clocked:
    """A link on which time passes as on `machine`."""

    def __init__(self, link, machine, arrivals):
        self.rank, self.size = link.rank, link.size
        self.now = self.send_port_free = self.receive_port_free = machine.start(link.rank)
        self._slow = machine.slow(link.rank)
        self._link, self._machine, self._arrivals = link, machine, arrivals

    def isend(self, x, to):
        wire = self._machine.wire(self.rank, to)
        self.now += wire.overhead * self._slow
        start = max(self.now, self.send_port_free)
        self.send_port_free = start + wire.gap + wire.seconds_per_byte * x.nbytes
        self._arrivals[self.rank, to].append(
            start + wire.seconds_per_byte * x.nbytes + wire.latency
        )
        return Until(self, self._link.isend(x, to), self.send_port_free)

    def irecv(self, x, source):
        return Arrival(self, self._link.irecv(x, source), source, x.nbytes)

    def sendrecv(self, x, to, inbox, source):
        receive, send = self.irecv(inbox, source), self.isend(x, to)
        receive.wait()
        send.wait()

    def arrived(self, source, nbytes):
        """Let the next message from `source` in, once those before are in."""
        wire = self._machine.wire(source, self.rank)
        takes = wire.gap + wire.seconds_per_byte * nbytes
        self.receive_port_free = max(
            self._arrivals[source, self.rank].popleft(), self.receive_port_free + takes
        )
        self.now = max(self.now, self.receive_port_free) + wire.overhead * self._slow

    def add(self, a, b, out):
        np.add(a, b, out=out)
        self.now += self._machine.gamma * self._slow * out.nbytes
        return out


class Part:
    """The link to some of the ranks of a clocked one, on the same clock."""

    def __init__(self, link, ranks):
        self.rank, self.size = ranks.index(link.rank), len(ranks)
        self._link, self._ranks = link, ranks

    def isend(self, x, to):
        return self._link.isend(x, self._ranks[to])

    def irecv(self, x, source):
        return self._link.irecv(x, self._ranks[source])

    def sendrecv(self, x, to, inbox, source):
        self._link.sendrecv(x, self._ranks[to], inbox, self._ranks[source])


def over_hosts(link, hosts):
    """Return the group of all ranks of a clocked link, of which rank r is on `hosts[r]`."""
    nodes = tuple(
        tuple(r for r, h in enumerate(hosts) if h == item) for item in dict.fromkeys(hosts)
    )
    own = next(node for node in nodes if link.rank in node)
    local = own.index(link.rank)
    rail = tuple(node[local] for node in nodes if len(node) > local)
    return Group(link, nodes=nodes, node=Part(link, own), across=Part(link, rail))


class Until:
    def __init__(self, link, request, end):
        self._link, self._request, self._end = link, request, end

    def wait(self):
        self._request.wait()
        self._link.now = max(self._link.now, self._end)


class Arrival:
    def __init__(self, link, request, source, nbytes):
        self._link, self._request, self._of = link, request, (source, nbytes)

    def wait(self):
        self._request.wait()
        self._link.arrived(*self._of)


def clocks(call: Callable, size: int, n: int, machine: Machine) -> list[float]:
    """Return when each rank is done with `call(link, x, add)` on n bytes."""
    arrivals: dict = defaultdict(deque, {(a, b): deque() for a in range(size) for b in range(size)})

    def body(link):
        clocked = Clocked(link, machine, arrivals)
        call(clocked, np.zeros(n // 8), clocked.add)
        return clocked.now

    return run_ranks(size, body)
