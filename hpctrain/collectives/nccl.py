"""NVIDIA's all-reduce for CuPy arrays on GPUs: like `native`, a rival in benchmarks and an oracle.

Each group makes its communicator on the first call, from an identifier that rank 0 broadcasts. The
bytes may differ between ranks. See `hpctrain.transport.device.nccl`.

CUDA numbers the GPUs visible to a process: if a site makes one GPU visible to each rank, each GPU
is number 0. So ranks of a node compare the PCI addresses of their GPUs, as NCCL does.
"""

from __future__ import annotations

from functools import partial
from weakref import WeakKeyDictionary

import numpy as np

from hpctrain.collectives.group import Group
from hpctrain.collectives.reductions.extremum import Extremum
from hpctrain.collectives.reductions.operations import Operation
from hpctrain.collectives.small_messages import all_gather_bytes
from hpctrain.collectives.tree import broadcast
from hpctrain.collectives.vote import elementwise_maximum
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
    communicator, endpoint = communicator_for(group, x), group.link.endpoint
    survives, waits = endpoint.survivors.survives, endpoint.waits
    wait_for = partial(waits.wait_for, call=b"nccl") if survives else None
    if isinstance(op, Extremum):
        keys = op.encode(x)
        communicator.allreduce(keys, op.ufunc, wait_for)
        op.decode(keys)
    else:
        communicator.allreduce(x, op, wait_for)


def communicator_for(group: Group, x: Array) -> Communicator:
    """Return the communicator of a group's ranks for arrays like `x`; the first call is collective.

    The communicator uses the GPU of `x`; for an array of the host, a visible GPU chosen by local
    rank. Raises UsageError on all ranks if two ranks of a node would share a GPU.
    """
    link, node = group.link, group.node or group.link
    if link not in _communicators:
        device = (
            x.data.device_id if on_device(x) else node.rank % count_devices(load_libraries()[0])
        )
        gpu_id = load_libraries()[0].cuda.runtime.deviceGetPCIBusId(device)
        gpu_ids = all_gather_bytes(node, gpu_id.encode())  # of the GPUs of this node's ranks
        max_missing = elementwise_maximum(group, ((node.size - len(set(gpu_ids))), 0))[0]
        if max_missing > 0:
            raise UsageError(
                "algorithm 'nccl': expected a GPU for each rank, seen a node with "
                f"{max_missing} fewer; start fewer ranks on each, or take algorithm = 'auto'"
            )
        id_buffer = new_unique_id() if link.rank == 0 else np.zeros(ID_BYTES, np.uint8)
        broadcast(group, id_buffer)
        _communicators[link] = Communicator(
            link.rank, link.size, device, id_buffer, link.endpoint.survivors.survives
        )
    return _communicators[link]
