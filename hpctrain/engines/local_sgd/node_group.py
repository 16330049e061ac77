"""The ranks of one node that take each step together, where nodes train apart.

Gradients are summed in the node, where wires are fast, in every step; the exchange between
nodes is the engine's. A node of one rank sums nothing.
"""

from __future__ import annotations

import numpy as np

from hpctrain.collectives import AllReduceFunction, Group
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.engines.engine import Times
from hpctrain.nn import Key
from hpctrain.world import World


class Node:
    """This rank's node: all ranks on the same host; or, not `together`, this rank alone."""

    def __init__(self, world: World, times: Times, allreduce: AllReduceFunction, together: bool):
        """Make the link of the node; collective."""
        color = world.hosts.index(world.host) if together else world.rank
        self._group = Group(world.link_for("node", color))
        self._times, self._allreduce, self._trace = times, allreduce, world.trace

    @property
    def size(self) -> int:
        return self._group.link.size

    @property
    def bytes_sent(self) -> int:
        return self._group.link.bytes_sent

    def key(self, key: Key) -> Key:
        """Return `key` with which layers sum over the node."""
        return key if self.size == 1 else key._replace(sum_over_ranks=self._small_sum)

    def sum(self, grad: np.ndarray, finite: bool) -> bool:
        """Sum the gradients of the node in place; return whether all its ranks are `finite`."""
        if self.size == 1:
            return finite
        with self._trace.span("sum in the node", "wait") as waiting:
            bad = np.array([not finite], np.int32)
            recursive_doubling(self._group, bad, np.maximum)
            if not bad[0]:
                self._allreduce(self._group, grad, np.add)
        self._waited(waiting.seconds)
        return not bad[0]

    def close(self) -> None:
        """Free the link; collective."""
        self._group.link.free()

    def _small_sum(self, numbers: np.ndarray) -> np.ndarray:
        with self._trace.span("sum in a layer", "wait") as waiting:
            total = np.array(numbers, np.float64)
            recursive_doubling(self._group, total, np.add)
        self._waited(waiting.seconds)
        return total

    def _waited(self, seconds: float) -> None:
        self._times.wait_s += seconds
        self._times.wire_s += seconds
