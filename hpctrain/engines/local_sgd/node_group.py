"""The ranks of a node, which take each step together while nodes train apart.

In every step gradients are summed within the node, over fast links; the engine exchanges parameters
between nodes. A node with a single rank sums nothing.
"""

from __future__ import annotations

from functools import partial

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
        self.link = world.link_for("node", color)
        self._group, self._allreduce = Group(self.link), allreduce
        self._times, self._trace = times, world.trace

    @property
    def size(self) -> int:
        return self.link.size

    def key_with_sums(self, key: Key) -> Key:
        """Return `key` with a function by which layers sum over the node."""
        if self.size == 1:
            return key
        add = partial(sum_in_layer, self._group, self._times, self._trace, on_wire=True)
        return key._replace(sum_over_ranks=add)

    def sum_gradients(self, grad: np.ndarray, is_finite: bool) -> bool:
        """Sum the gradients of the node in place, if all are finite; return whether they are."""
        if self.size == 1:
            return is_finite
        with self._times.wait(self._trace, "sum in the node", on_wire=True):
            failure = np.array([not is_finite], np.int32)
            recursive_doubling(self._group, failure, np.maximum)
            if not failure[0]:
                self._allreduce(self._group, grad, np.add)
        return not failure[0]
