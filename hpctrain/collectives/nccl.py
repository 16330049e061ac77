"""NVIDIA's all-reduce, with CuPy and GPUs: like `native`, a rival and an oracle.

Each group makes its communicator on the first call, from an identifier that rank 0 broadcasts. The
bytes may differ between ranks. See `hpctrain.transport.device.nccl`.

CUDA numbers GPUs per process: if a site makes one GPU visible to each rank, all are number 0. So
ranks of a node exchange the PCI addresses of theirs, by which NCCL distinguishes them, too.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from hpctrain.collectives.group import Group
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.collectives.reductions.extremum import Extremum
from hpctrain.collectives.reductions.operations import Operation
from hpctrain.collectives.small_messages import all_gather_bytes
from hpctrain.collectives.tree import broadcast
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, on_device
from hpctrain.transport.device.nccl import (
    ID_BYTES,
    Communicator,
    count_devices,
    load_libraries,
    new_unique_id,
)
from hpctrain.transport.link import Link

_communicators: WeakKeyDictionary[Link, Communicator] = WeakKeyDictionary()


def nccl(group: Group, x: Array, op: Operation) -> None:
    """Reduce flat `x` in place over all ranks of `group`."""
    if x.size == 0:
        return
    if isinstance(op, Extremum):
        keys = op.encode(x)
        communicator(group, x).allreduce(keys, op.ufunc)
        op.decode(keys)
    else:
        communicator(group, x).allreduce(x, op)


def communicator(group: Group, x: Array) -> Communicator:
    """Return the communicator of a group's ranks for arrays like `x`; the first call is collective.

    It is on the GPU of `x`; for arrays of the host on a visible GPU, in turn by local rank. Raises
    UsageError on all ranks if two of a node would share a GPU.
    """
    link, node = group.link, group.node or group.link
    if link not in _communicators:
        device = (
            x.data.device_id if on_device(x) else node.rank % count_devices(load_libraries()[0])
        )
        _must_suffice(group, _shared(node, device))
        id_buffer = new_unique_id() if link.rank == 0 else np.zeros(ID_BYTES, np.int16)
        broadcast(group, id_buffer)
        _communicators[link] = Communicator(link.rank, link.size, device, id_buffer)
    return _communicators[link]


def _shared(node: Link, device: int) -> int:
    """Return the number of GPUs that the node lacks, with this rank on `device`; collective."""
    name = load_libraries()[0].cuda.runtime.deviceGetPCIBusId(device)
    return node.size - len(set(all_gather_bytes(node, name.encode())))


def _must_suffice(group: Group, missing_text: int) -> None:
    """Raise UsageError, on all ranks, if a node lacks GPUs for its ranks."""
    shortage = np.array([missing_text])
    recursive_doubling(group, shortage, np.maximum)
    if shortage[0] > 0:
        raise UsageError(
            "algorithm 'nccl': expected a GPU for each rank, seen a node with "
            f"{shortage[0]} fewer; start fewer ranks on each, or take algorithm = 'auto'"
        )
