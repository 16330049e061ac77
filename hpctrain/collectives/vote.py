"""The vote of each step: the maxima of two small numbers over all ranks.

On one node it is one exchange of flags in shared memory, with the numbers as payload; between
nodes, or without shared memory, ceil(log2 P) short messages (recursive_doubling.py). After it, all
earlier writes to node memory are visible to all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.collectives.group import Group
from hpctrain.collectives.recursive_doubling import recursive_doubling

BITS = 16  # of each number in a payload: enough for any rank of one node


def elementwise_maximum(group: Group, pair: Sequence[int]) -> list[int]:
    """Return the maxima over all ranks of the first and of the second number; collective.

    Both are 0 .. 65535, or, on several nodes, up to 2^63 - 1.
    """
    if len(group.nodes) == 1 and group.node_buffers is not None:
        first, second = pair
        words = group.node_buffers.flags.exchange(first << BITS | second)
        return [max(words) >> BITS, max(word & ((1 << BITS) - 1) for word in words)]
    numbers = np.array(pair, np.int64)
    recursive_doubling(group, numbers, np.maximum)
    return numbers.tolist()
