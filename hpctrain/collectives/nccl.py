"""NVIDIA's all-reduce, where CuPy and GPUs are: as `native`, a rival and an oracle.

Each group makes its communicator on the first call, of an identifier that rank 0 broadcasts. That
all ranks end with the same bytes is not promised. See `hpctrain.transport.nccl`.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from hpctrain.collectives.group import Group
from hpctrain.collectives.operations import Operation
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.collectives.tree import broadcast
from hpctrain.errors import UsageError
from hpctrain.transport.link import Link
from hpctrain.transport.nccl import ID_BYTES, Communicator, devices, libraries, new_id

_made: WeakKeyDictionary[Link, Communicator] = WeakKeyDictionary()


def nccl(group: Group, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place over all ranks of `group`."""
    if x.size:
        communicator(group).allreduce(x, op)


def communicator(group: Group) -> Communicator:
    """Return the communicator of a group's ranks; the first call is collective.

    Raises UsageError on all ranks where a node has fewer GPUs than ranks.
    """
    link, node = group.link, group.node or group.link
    if link not in _made:
        _must_suffice(group, node.size)
        shared = new_id() if link.rank == 0 else np.zeros(ID_BYTES, np.int16)
        broadcast(group, shared)
        _made[link] = Communicator(link.rank, link.size, node.rank, shared)
    return _made[link]


def _must_suffice(group: Group, ranks: int) -> None:
    """Raise UsageError, on all ranks, unless each node has a GPU for each of its ranks."""
    lacking = np.array([ranks - devices(libraries()[0])])
    recursive_doubling(group, lacking, np.maximum)
    if lacking[0] > 0:
        raise UsageError(
            "algorithm 'nccl': expected a GPU for each rank, seen a node with "
            f"{lacking[0]} fewer; start fewer ranks on each, or take algorithm = 'auto'"
        )
