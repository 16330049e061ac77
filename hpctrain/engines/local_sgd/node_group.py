"""The ranks of one node, which take each step together while nodes train apart.

Gradients are summed within the node, over fast links, in every step; the exchange between nodes is
the engine's. A node of one rank sums nothing.
"""

from __future__ import annotations

import numpy as np

from hpctrain.collectives import AllReduceFunction, Group
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.engines.engine import Times, sum_in_layer
from hpctrain.nn import Key
from hpctrain.world import World


class NodeGroup:
    """This rank's node: all ranks on the same host; without `per_host` this rank alone."""

    def __init__(self, world: World, times: Times, allreduce: AllReduceFunction, per_host: bool):
        """Create the link of the node; collective."""
        color = world.hosts.index(world.host) if per_host else world.rank
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
        return key if self.size == 1 else key._replace(sum_over_ranks=self._sum_in_layer)

    def sum(self, grad: np.ndarray, finite: bool) -> bool:
        """Sum the gradients of the node in place; return whether all its ranks are `finite`."""
        if self.size == 1:
            return finite
        with self._trace.span("sum in the node", "wait") as waiting:
            bad = np.array([not finite], np.int32)
            recursive_doubling(self._group, bad, np.maximum)
            if not bad[0]:
                self._allreduce(self._group, grad, np.add)
        self._times.wait_s += waiting.seconds
        self._times.wire_s += waiting.seconds
        return not bad[0]

    def close(self) -> None:
        """Free the link; collective."""
        self._group.link.free()

    def _sum_in_layer(self, numbers: np.ndarray) -> np.ndarray:
        waited = self._times.wait_s
        total = sum_in_layer(self._group, numbers, self._times, self._trace)
        self._times.wire_s += self._times.wait_s - waited
        return total
