"""The vote of each step: the maxima of two small numbers over all ranks.

On one node it is one exchange of flags in shared memory, with the numbers as payload; between
nodes, or without shared memory, ceil(log2 P) short messages (recursive_doubling.py). After the
vote, all earlier writes to node memory are visible to all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.collectives.group import Group
from hpctrain.collectives.recursive_doubling import recursive_doubling

BITS_PER_NUMBER = 16  # of each number in a payload: enough for any rank of one node


def elementwise_maximum(group: Group, numbers: Sequence[int]) -> list[int]:
    """Return the maxima over all ranks of the first and of the second number; collective.

    Both of `numbers` are 0 .. 65535; on several nodes they may be up to 2^63 - 1.
    """
    if len(group.nodes) == 1 and group.node_buffers is not None:
        first, second = numbers
        words = group.node_buffers.flags.exchange(first << BITS_PER_NUMBER | second)
        return [
            max(words) >> BITS_PER_NUMBER,
            max(word & ((1 << BITS_PER_NUMBER) - 1) for word in words),
        ]
    maxima = np.array(numbers, np.int64)
    recursive_doubling(group, maxima, np.maximum)
    return maxima.tolist()
