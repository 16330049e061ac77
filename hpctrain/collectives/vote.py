"""The vote of each step: of two small numbers the largest that any rank says, known to all.

On one node it is one exchange of flags in shared memory, whose payload is what is said; between
nodes, or where nothing is shared, ceil(log2 P) short messages (recursive_doubling.py). After it,
all ranks see what each has written to node memory before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.collectives.group import Group
from hpctrain.collectives.recursive_doubling import recursive_doubling

BITS = 16  # of each number in a payload: enough for any rank of one node


def largest(group: Group, said: Sequence[int]) -> list[int]:
    """Return the largest of all ranks' first numbers and of their second ones; collective.

    Both are 0 .. 65535, or, on several nodes, up to 2^63 - 1.
    """
    if len(group.nodes) == 1 and group.near is not None:
        first, second = said
        words = group.near.flags.exchange(first << BITS | second)
        return [max(words) >> BITS, max(word & ((1 << BITS) - 1) for word in words)]
    numbers = np.array(said, np.int64)
    recursive_doubling(group, numbers, np.maximum)
    return numbers.tolist()
