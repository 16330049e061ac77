"""The context of every algorithm: links to the participating ranks, and scratch memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpctrain.collectives.chunks import STREAM_SEGMENT_BYTES
from hpctrain.collectives.dispatch import Choices
from hpctrain.collectives.node_buffers import NodeBuffers, make_node_buffers
from hpctrain.core.xp import Array, finish, namespace
from hpctrain.transport.link import Link
from hpctrain.transport.shared_memory.host import NodeMemory


class Scratch:
    """Memory that is kept from call to call, so that no step of training allocates."""

    def __init__(self) -> None:
        self._host_memory = np.empty(0, np.uint8)
        self._gpu_memory: dict[int, Array] = {}  # by the number of the GPU

    def host_buffer(self, length: int, dtype: np.dtype) -> np.ndarray:
        """Return an array of `length` elements; the next call hands out the same memory."""
        nbytes = length * dtype.itemsize
        if self._host_memory.nbytes < nbytes:
            self._host_memory = np.empty(nbytes, np.uint8)
        return self._host_memory[:nbytes].view(dtype)

    def buffer(self, x: Array, length: int, dtype: Any = None) -> Array:
        """Return `host_buffer` for the device of `x`, by default with the dtype of `x`."""
        dtype = x.dtype if dtype is None else np.dtype(dtype)
        if type(x) is np.ndarray:
            return self.host_buffer(length, dtype)
        device, nbytes = x.data.device_id, length * dtype.itemsize
        if device not in self._gpu_memory or self._gpu_memory[device].nbytes < nbytes:
            # CuPy's pool may reuse the freed memory on another stream while ours still reads it.
            finish(x)
            self._gpu_memory[device] = namespace(x).empty(nbytes, np.uint8)
        return self._gpu_memory[device][:nbytes].view(dtype)

    def buffer_like(self, x: Array) -> Array:
        """Return an array of `x`'s length and dtype; the next call hands out the same memory."""
        return self.buffer(x, x.size)

    def buffer_rows(self, x: Array, count: int, row_bytes: int) -> Array:
        """Return an array (count, n) of `x`'s dtype, n being the longest segment of `x`."""
        length = min(x.size, max(1, row_bytes // x.itemsize))
        return self.buffer(x, count * length).reshape(count, length)


@dataclass(frozen=True)
class Group:
    """Ranks that reduce together; built once, used by one thread."""

    link: Link
    scratch: Scratch = field(default_factory=Scratch)
    nodes: tuple[tuple[int, ...], ...] = ()  #: the ranks of each node, in the order of first ranks
    node: Link | None = None  #: to the ranks of our node, in their order
    across: Link | None = None  #: to the ranks that have our local rank, one of each node
    memory: NodeMemory | None = None  #: shared by the ranks of `node`; None without sharing
    spins: bool = False  #: whether this thread may poll flags without yielding its core
    choices: Choices | None = None  #: of `auto`; None: chosen by the cost model
    _node_buffers: list[NodeBuffers | None] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @property
    def node_buffers(self) -> NodeBuffers | None:
        """This node's flags and buffers, None without shared memory; first use is collective."""
        if not self._node_buffers:
            node = self.node if self.memory is not None and self.memory.kind is not None else None
            self._node_buffers.append(None if node is None else make_node_buffers(node, self.spins))
        return self._node_buffers[0]

    @property
    def stream_segment_bytes(self) -> int:
        """The length of segments between nodes, the same on all ranks."""
        choices = self.choices
        return STREAM_SEGMENT_BYTES if choices is None else choices.stream_segment_bytes

    @property
    def links(self) -> list[Link]:
        """All links of this group."""
        return [link for link in (self.link, self.node, self.across) if link is not None]

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent in this group."""
        return sum(link.endpoint.traffic.bytes_sent for link in self.links)

    @property
    def host_bytes(self) -> int:
        """Bytes of GPUs' arrays that this rank has copied to or from the host for this group."""
        return sum(link.endpoint.traffic.host_bytes for link in self.links)

    def free(self) -> None:
        """Give back all links; all ranks must call."""
        for link in reversed(self.links):
            link.endpoint.free()


def group_over_nodes(link: Link, hosts: Sequence[str]) -> Group:
    """Return the group of all ranks of `link`, each on its host of `hosts`; collective."""
    ranks = range(link.size)
    nodes = tuple(tuple(r for r in ranks if hosts[r] == name) for name in dict.fromkeys(hosts))
    node = link.split(hosts.index(hosts[link.rank]), link.rank)
    across = link.split(node.rank, link.rank)
    return Group(link, nodes=nodes, node=node, across=across)
