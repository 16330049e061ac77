"""Rank, size and store of `torch.distributed` from MPI: the rendezvous `env://` without variables.

PyTorch's `env://` reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun sets. srun
and mpirun set none of them. If none is set and a launcher of MPI has started this process, rank 0
serves a TCPStore at a free port, and its addresses and port are broadcast over MPI. This also
serves the backends "gloo" and "nccl". Where any of the variables is set, PyTorch's own rendezvous
takes place.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from hpctrain.core import launchers
from hpctrain.core.errors import TransportError
from hpctrain.torch.autoload import BACKEND
from hpctrain.torch.job import start_job
from hpctrain.world import World

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
log = logging.getLogger(__name__)
CONNECT_S = 2.0  #: time for one address of rank 0 to answer; the next is tried after it


def is_ours(url: str, environ: Mapping[str, str]) -> bool:
    """Return whether MPI gives the ranks: no other rendezvous is set, and a launcher is seen.

    Alone, without a launcher, only for our own backend: other backends then have their own error.
    """
    if any(environ.get(name) for name in _VARIABLES):
        return False
    query = parse_qs(urlparse(url).query)
    if any(int(values[0]) >= 0 for values in query.values()):
        return False
    return launchers.launched(environ).name != "none" or _requested_backend() == BACKEND


def _requested_backend() -> str | None:
    """Return the `backend` of the `init_process_group` under way; handlers are not given it."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code.co_name == "init_process_group":
            return str(frame.f_locals.get("backend"))
    return None


def over_mpi(timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield (store, rank, size) of this job; collective over all ranks."""
    job = start_job(timeout)
    if job.size == 1 and launchers.launched(os.environ).name == "none":
        log.warning("hpctrain: 1 rank: no launcher has started this script, such as mpirun or srun")
    local_rank = {"LOCAL_RANK": job.local_rank, "LOCAL_WORLD_SIZE": job.node.size}
    for name, value in local_rank.items():  # `dist.get_node_local_rank` reads it
        os.environ.setdefault(name, str(value))
    yield _make_store(job, timeout or timedelta(minutes=30)), job.rank, job.size
    raise RuntimeError("the rendezvous over MPI cannot be repeated in this call")


def _make_store(job: World, timeout: timedelta) -> dist.Store:
    """Return this rank's view of the store that rank 0 serves; collective."""
    if job.size == 1:
        return dist.HashStore()
    server = None
    if job.rank == 0:
        server = dist.TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False)
    own_line = " ".join([str(server.port), *_addresses()]) if server is not None else ""
    port, *addresses = job.gather(own_line)[0].split()
    if server is not None:
        server.set_timeout(timeout)
        return server
    if job.hosts[0] == job.host:
        addresses.insert(0, "127.0.0.1")
    address = _first_reachable(addresses, int(port), job)
    return dist.TCPStore(address, int(port), None, is_master=False, timeout=timeout)


def _addresses() -> list[str]:
    """Return the addresses of this host, those of its name first, loopback excepted."""
    names = [item[4][0] for item in _resolve(socket.gethostname())]
    interfaces = []
    for _, name in socket.if_nameindex():
        interfaces += _addresses_of_interface(name)
    addresses = dict.fromkeys(str(address) for address in (*names, *interfaces))
    return [address for address in addresses if not address.startswith(("127.", "::1"))]


def _resolve(name: str) -> list[Any]:
    try:
        return socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:  # a host without an entry of its own name
        return []


def _addresses_of_interface(name: str) -> list[str]:
    """Return the IPv4 address of the network interface `name`, if it has one."""
    import fcntl
    import struct

    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), get_address, struct.pack("256s", name.encode()))
        except OSError:  # no IPv4 address
            return []
    return [socket.inet_ntoa(answer[20:24])]


def _first_reachable(addresses: list[str], port: int, job: World) -> str:
    for address in addresses:
        try:
            socket.create_connection((address, port), CONNECT_S).close()
        except OSError:
            continue
        return address
    raise TransportError(
        f"rank {job.rank} on {job.host}: no address of rank 0 on {job.hosts[0]} answers at port "
        f"{port}, tried {', '.join(addresses) or 'none'}: PyTorch's store needs TCP between hosts; "
        "set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE for another rendezvous"
    )
