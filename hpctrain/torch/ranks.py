"""Torchrun's variables of this rank, from MPI that starts before the script.

Neither PyTorch nor a GPU is used here: a script may set variables before it imports PyTorch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import NamedTuple

from hpctrain.core import launchers, torchrun
from hpctrain.core.launchers import Launched
from hpctrain.watch.liveness.channel import (
    choose_addresses,
    fast_addresses,
    fast_interfaces,
    host_addresses,
)

#: the variables that `set_variables` has set; empty in a script that was started without it
variables: dict[str, str] = {}
_reserved: list[socket.socket] = []


class JobRank(NamedTuple):
    """A rank by MPI, its node and the address of rank 0."""

    job: Launched
    node: int
    address: str
    port: int
    has_fast_network: bool = False  #: whether all of several nodes have one


def set_variables() -> JobRank:
    """Start MPI and set torchrun's variables of this rank; collective over all ranks.

    MPI is finalized at exit. Raises UsageError if the launcher belongs to another MPI than the one
    that mpi4py loads.
    """
    from hpctrain.world.process import start_before_script

    job = launchers.launched(os.environ)
    comm = start_before_script(job)
    rank = _locate(job.name, comm.rank, comm.allgather)
    comm.Free()
    variables.update(torchrun.variables(rank.job, rank.node, rank.address, rank.port))
    torchrun.set_variables(variables)
    if rank.has_fast_network:
        set_interfaces()
    return rank


def set_interfaces() -> None:
    """Name the fast network to Gloo and NCCL, which would take the network of the host's name.

    Variables that the user has set stay.
    """
    names = fast_interfaces()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
    os.environ.setdefault("NCCL_SOCKET_IFNAME", ",".join(names))


def _locate(name: str, rank: int, gather: Callable[[str], list[str]]) -> JobRank:
    """Return the rank on its node, from every rank's host and addresses; collective."""
    hosts = gather(socket.gethostname())
    nodes = launchers.nodes(hosts, gather(os.environ.get("SLURMD_NODENAME", "")))
    own = nodes[rank]
    job = Launched(name, rank, len(nodes), nodes[:rank].count(own), nodes.count(own))
    if rank == 0:
        _reserved.append(torchrun.reserve_port())
    port = gather(str(_reserved[0].getsockname()[1]) if rank == 0 else "")[0]
    distinct = [*dict.fromkeys(nodes)]
    fast, slow = (
        choose_addresses([texts[nodes.index(node)].split() for node in distinct])
        for texts in (gather(" ".join(find())) for find in (fast_addresses, host_addresses))
    )
    address = [*fast, *slow, hosts[0]][0]
    if len(distinct) == 1:
        return JobRank(job, 0, torchrun.LOOPBACK, int(port))
    return JobRank(job, distinct.index(own), address, int(port), bool(fast))
