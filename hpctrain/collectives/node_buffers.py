"""Node buffers: the flags shared by the ranks of a node, and buffers to copy through.

They are made on first use over the link of the group, which keeps them: like that link, they belong
to the group's thread. Buffers on GPUs are made for the first GPU array that no neighbour maps.
"""

from __future__ import annotations

import logging
from functools import lru_cache, partial

import numpy as np

from hpctrain.collectives.small_messages import all_gather_bytes
from hpctrain.core.errors import GpuMemoryError
from hpctrain.core.xp import Array
from hpctrain.transport.link import Link
from hpctrain.transport.shared_memory.cuda_ipc import SharedGpuMemory
from hpctrain.transport.shared_memory.flags import NodeFlags, words_needed
from hpctrain.transport.shared_memory.host import ALIGN_BYTES, NodeMemory

#: Arrays of up to this length are copied as a whole, and every rank adds all copies.
SHORT_BUFFER_BYTES = 128 << 10
#: Views of short buffers are cached for so many lengths.
MAX_CACHED_LENGTHS = 256
#: This buffer for longer arrays fits the cache together with parts of the neighbours' buffers.
LONG_BUFFER_BYTES = 1 << 20
#: On a GPU: so long that the two waits of the host for each piece take less time than its copies.
GPU_BUFFER_BYTES = 64 << 20
log = logging.getLogger(__name__)


class NodeBuffers:
    """The flags and the copy buffers of a node's ranks, as one rank maps them."""

    def __init__(self, node: Link, flags: NodeFlags, buffers: list[np.ndarray]):
        """`buffers`: (2 * SHORT_BUFFER_BYTES + LONG_BUFFER_BYTES,) uint8 of each rank."""
        self.link, self.flags = node, flags
        #: (bytes, dtype) -> every rank's short buffer, first in even rounds, then in odd ones
        self.short_buffers = lru_cache(MAX_CACHED_LENGTHS)(
            partial(_views_of_short_buffers, flags.spare_bytes, buffers)
        )
        self._long_memory = [x[2 * SHORT_BUFFER_BYTES :] for x in buffers]
        self._gpu_memory: SharedGpuMemory | None = None
        self._gpu_buffers: list[Array] | None = None

    def long_buffers(self, dtype: np.dtype) -> list[np.ndarray]:
        """Return every rank's long buffer as an array (P, n): a row for each part."""
        row_bytes = LONG_BUFFER_BYTES // len(self._long_memory) // ALIGN_BYTES * ALIGN_BYTES
        used_bytes = row_bytes * len(self._long_memory)
        return [
            buffer[:used_bytes].view(dtype).reshape(len(self._long_memory), -1)
            for buffer in self._long_memory
        ]

    def gpu_buffers(self, dtype: np.dtype) -> list[Array] | None:
        """Return every rank's buffer on its GPU as an array of `dtype`.

        None where CUDA IPC is refused, or a GPU has no room. The first use is collective: each rank
        of the node has a GPU. They stay as long as the process: to give them back, all ranks of the
        node would have to wait for each other, also where one has failed.
        """
        if self._gpu_memory is None:
            self._gpu_memory = SharedGpuMemory(
                self.link, partial(all_gather_bytes, self.link), one_gpu=False
            )
            self._gpu_buffers = self._map_gpu_buffers(self._gpu_memory)
        return self._gpu_buffers and [buffer.view(dtype) for buffer in self._gpu_buffers]

    def _map_gpu_buffers(self, memory: SharedGpuMemory) -> list[Array] | None:
        try:
            own = memory.zeros(GPU_BUFFER_BYTES, np.uint8)
        except GpuMemoryError as error:  # on all ranks
            if self.link.rank == 0:
                log.warning("GPU arrays are sent as messages, which is slower: %s", error)
            return None
        location = memory.locate(own)
        return None if location is None else location.arrays


def _views_of_short_buffers(
    spare_bytes: np.ndarray, buffers: list[np.ndarray], nbytes: int, dtype: np.dtype
) -> list[list[np.ndarray]]:
    """Return every rank's two short buffers as arrays of `nbytes`; the shortest lie beside flags.

    Short buffers alternate with the rounds of the flags: before one is written again, all ranks
    have completed another round, and so have read the buffer.
    """
    if nbytes <= spare_bytes.shape[-1]:
        return [[line[:nbytes].view(dtype) for line in lines] for lines in spare_bytes]
    return [
        [buffer[offset : offset + nbytes].view(dtype) for buffer in buffers]
        for offset in (0, SHORT_BUFFER_BYTES)
    ]


def make_node_buffers(node: Link, spins: bool) -> NodeBuffers | None:
    """Return the buffers shared by the ranks of `node`, None without shared memory; collective."""
    memory = NodeMemory(node, partial(all_gather_bytes, node))
    flag_words = memory.common_zeros(words_needed(node.size), np.uint64)
    buffers = memory.neighbours(memory.zeros(2 * SHORT_BUFFER_BYTES + LONG_BUFFER_BYTES, np.uint8))
    if flag_words is None or buffers is None:
        return None
    return NodeBuffers(node, NodeFlags(node, flag_words, spins), buffers)
