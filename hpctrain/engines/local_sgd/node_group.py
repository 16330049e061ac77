"""The ranks of one node, which take each step together while nodes train apart.

In every step gradients are summed within the node, over fast links; the engine exchanges parameters
between nodes. A node of one rank sums nothing.
"""

from __future__ import annotations

import numpy as np

from hpctrain.collectives import AllReduceFunction, Group
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.engines.engine import Times, sum_in_layer
from hpctrain.nn import Key
from hpctrain.world import World


class NodeGroup:
    """The ranks on this rank's host; without `group_by_host` only this rank."""

    def __init__(
        self, world: World, times: Times, allreduce: AllReduceFunction, group_by_host: bool
    ):
        """Create the link of the node; collective."""
        color = world.hosts.index(world.host) if group_by_host else world.rank
        self._group = Group(world.link_for("node", color))
        self._times, self._allreduce, self._trace = times, allreduce, world.trace

    @property
    def size(self) -> int:
        return self._group.link.size

    @property
    def bytes_sent(self) -> int:
        return self._group.link.bytes_sent

    def key_with_sums(self, key: Key) -> Key:
        """Return `key` with a function by which layers sum over the node."""
        return key if self.size == 1 else key._replace(sum_over_ranks=self._sum_in_layer)

    def sum_gradients(self, grad: np.ndarray, is_finite: bool) -> bool:
        """Sum the gradients of the node in place, if all are finite; return whether they are."""
        if self.size == 1:
            return is_finite
        with self._trace.span("sum in the node", "wait") as wait_span:
            failure = np.array([not is_finite], np.int32)
            recursive_doubling(self._group, failure, np.maximum)
            if not failure[0]:
                self._allreduce(self._group, grad, np.add)
        self._times.wait_s += wait_span.seconds
        self._times.wire_s += wait_span.seconds
        return not failure[0]

    def close(self) -> None:
        """Free the link; collective."""
        self._group.link.free()

    def _sum_in_layer(self, numbers: np.ndarray) -> np.ndarray:
        wait_s_before = self._times.wait_s
        total = sum_in_layer(self._group, numbers, self._times, self._trace)
        self._times.wire_s += self._times.wait_s - wait_s_before
        return total
