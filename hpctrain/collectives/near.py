"""What the ranks of one node share beside their arrays: flags, and slots to copy through.

Made on first use and kept by the group, over the group's own link: so it belongs to the group's
thread, as the link does.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from hpctrain.collectives.agree import all_gather_bytes
from hpctrain.transport.flags import Flags, words_needed
from hpctrain.transport.link import Link
from hpctrain.transport.memory import Memory

SLOT_BYTES = 256 << 10  # two of them, and what is read from neighbours, stay in the cache


class Near:
    """The flags and the slots of the ranks of one node, seen from one of them."""

    def __init__(self, node: Link, flags: Flags, slots: list[np.ndarray]):
        """`slots`: (2 * SLOT_BYTES,) uint8 of each rank."""
        self.link, self.flags = node, flags
        self._slots = [[x[at : at + SLOT_BYTES] for x in slots] for at in (0, SLOT_BYTES)]

    def slots_like(self, x: np.ndarray) -> list[np.ndarray]:
        """Return every rank's slot as an array like `x`, which must fit, for the next exchange.

        Slots alternate with the rounds of the flags: one that is written again was read by all.
        """
        return [slot[: x.nbytes].view(x.dtype) for slot in self._slots[self.flags.odd]]


def near(node: Link, spins: bool) -> Near | None:
    """Return what the ranks of `node` share, None where they can share nothing; collective."""
    memory = Memory(node, partial(all_gather_bytes, node))
    words = memory.one_for_all(words_needed(node.size), np.uint64)
    slots = memory.neighbours(memory.zeros(2 * SLOT_BYTES, np.uint8))
    if words is None or slots is None:
        return None
    return Near(node, Flags(node, words, spins), slots)
