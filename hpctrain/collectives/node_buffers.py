"""Node buffers: the flags shared by the ranks of a node, and buffers to copy through.

Made on first use and kept by the group, over the group's own link: so they belong to the group's
thread, as the link does.
"""

from __future__ import annotations

from functools import lru_cache, partial

import numpy as np

from hpctrain.collectives.small_messages import all_gather_bytes
from hpctrain.transport.link import Link
from hpctrain.transport.shared_memory.flags import NodeFlags, words_needed
from hpctrain.transport.shared_memory.host import ALIGN_BYTES, NodeMemory

SHORT_BYTES = 128 << 10  # copied as a whole and added by every rank
CACHED_LENGTHS = 256  # of short arrays, whose buffer views are cached
LONG_BYTES = 1 << 20  # buffer of longer arrays: own buffer and parts of neighbours' fit the cache


class NodeBuffers:
    """The flags and the copy buffers of the ranks of one node, as mapped by one of them."""

    def __init__(self, node: Link, flags: NodeFlags, buffers: list[np.ndarray]):
        """`buffers`: (2 * SHORT_BYTES + LONG_BYTES,) uint8 of each rank."""
        self.link, self.flags = node, flags
        short = [[x[offset : offset + SHORT_BYTES] for x in buffers] for offset in (0, SHORT_BYTES)]
        #: (bytes, dtype, odd) -> every rank's short buffer in odd or even rounds: see _cut
        self.short = lru_cache(CACHED_LENGTHS)(partial(_cut, short))
        self._long = [x[2 * SHORT_BYTES :] for x in buffers]

    def long(self, dtype: np.dtype) -> list[np.ndarray]:
        """Return every rank's long buffer as an array (P, n): a row for each part."""
        row = LONG_BYTES // len(self._long) // ALIGN_BYTES * ALIGN_BYTES
        used_bytes = row * len(self._long)
        return [
            buffer[:used_bytes].view(dtype).reshape(len(self._long), -1) for buffer in self._long
        ]


def _cut(
    short: list[list[np.ndarray]], nbytes: int, dtype: np.dtype, parity: int
) -> list[np.ndarray]:
    """Return every rank's short buffer as an array of `nbytes`.

    Short buffers alternate with the rounds of the flags: before one is written again, all ranks
    have completed another round, and so have read it.
    """
    return [buffer[:nbytes].view(dtype) for buffer in short[parity]]


def make_node_buffers(node: Link, spins: bool) -> NodeBuffers | None:
    """Return the buffers shared by the ranks of `node`, None without shared memory; collective."""
    memory = NodeMemory(node, partial(all_gather_bytes, node))
    words = memory.common_zeros(words_needed(node.size), np.uint64)
    buffers = memory.neighbours(memory.zeros(2 * SHORT_BYTES + LONG_BYTES, np.uint8))
    if words is None or buffers is None:
        return None
    return NodeBuffers(node, NodeFlags(node, words, spins), buffers)
