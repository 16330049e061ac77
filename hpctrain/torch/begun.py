"""The number of operations that each rank of a group has begun, in memory shared by a node."""

from __future__ import annotations

import numpy as np

from hpctrain.transport.shared_memory.flags import WORDS_PER_LINE
from hpctrain.world import World


class Begun:
    """The number of operations that each rank of a node's group has begun, in shared memory.

    A count orders no other memory: the operation itself does.
    """

    def __init__(self, words: np.ndarray, rank: int, size: int):
        """`words` (size * WORDS_PER_LINE,) uint64, zeros at first, shared by the ranks."""
        self._words, self._own = words.data, rank * WORDS_PER_LINE
        self._peers = [peer * WORDS_PER_LINE for peer in range(size) if peer != rank]

    def begin(self, number: int) -> None:
        """Tell the others that this rank has begun operation `number`."""
        self._words[self._own] = number

    def by_all(self, number: int) -> bool:
        """Return whether all ranks have begun operation `number`."""
        words = self._words
        return all(words[peer] >= number for peer in self._peers)


def share_begun(world: World) -> Begun | None:
    """Return the counts of the ranks of `world`; None if they share no memory; collective."""
    if len(world.main.nodes) > 1:
        return None
    words = world.memory.common_zeros(world.size * WORDS_PER_LINE, np.uint64)
    return None if words is None else Begun(words, world.rank, world.size)
