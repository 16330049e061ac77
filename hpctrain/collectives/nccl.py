"""NVIDIA's all-reduce, where CuPy and GPUs are: as `native`, a rival and an oracle.

Each group makes its communicator on the first call, of an identifier that rank 0 broadcasts. That
all ranks end with the same bytes is not promised. See `hpctrain.transport.nccl`.

CUDA's numbers for GPUs are each process's own: where a site shows each rank one, all are number 0.
So ranks of a node tell each other the address of theirs, by which NCCL tells them apart, too.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from hpctrain.collectives.agree import all_gather_bytes
from hpctrain.collectives.extremum import Extremum
from hpctrain.collectives.group import Group
from hpctrain.collectives.operations import Operation
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.collectives.tree import broadcast
from hpctrain.errors import UsageError
from hpctrain.transport.link import Link
from hpctrain.transport.nccl import ID_BYTES, Communicator, devices, libraries, new_id
from hpctrain.xp import Array, on_device

_made: WeakKeyDictionary[Link, Communicator] = WeakKeyDictionary()


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

    It is on the GPU where `x` is; arrays of the host go to the one that is the rank's turn among
    those it sees. Raises UsageError on all ranks where two of a node would share a GPU.
    """
    link, node = group.link, group.node or group.link
    if link not in _made:
        device = x.data.device_id if on_device(x) else node.rank % devices(libraries()[0])
        _must_suffice(group, _shared(node, device))
        shared = new_id() if link.rank == 0 else np.zeros(ID_BYTES, np.int16)
        broadcast(group, shared)
        _made[link] = Communicator(link.rank, link.size, device, shared)
    return _made[link]


def _shared(node: Link, device: int) -> int:
    """Return how many GPUs too few the ranks of our node have, which compute on `device`."""
    name = libraries()[0].cuda.runtime.deviceGetPCIBusId(device)
    return node.size - len(set(all_gather_bytes(node, name.encode())))


def _must_suffice(group: Group, missing: int) -> None:
    """Raise UsageError, on all ranks, where a node misses GPUs for its ranks."""
    lacking = np.array([missing])
    recursive_doubling(group, lacking, np.maximum)
    if lacking[0] > 0:
        raise UsageError(
            "algorithm 'nccl': expected a GPU for each rank, seen a node with "
            f"{lacking[0]} fewer; start fewer ranks on each, or take algorithm = 'auto'"
        )
