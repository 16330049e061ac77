"""Rank, size and store of `torch.distributed` from MPI: the rendezvous `env://`.

PyTorch's `env://` reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun sets. srun
and mpirun set none. Where a launcher of MPI has started this process, rank 0 serves a
TCPStore at a free port, and its addresses and port are broadcast over MPI. This also serves the
backends "gloo" and "nccl". Where a script has set all of the variables by itself, and under
torchrun, these backends have PyTorch's own rendezvous. See core/torchrun.py for the choice.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import parent_process
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from hpctrain.collectives.small_messages import is_any
from hpctrain.collectives.tree import broadcast_first
from hpctrain.core import launchers, torchrun
from hpctrain.core.errors import TransportError, UsageError
from hpctrain.core.torchrun import Choice
from hpctrain.torch import ranks
from hpctrain.torch.autoload import BACKEND
from hpctrain.torch.job import start_job
from hpctrain.watch.liveness.channel import fast_addresses, fast_interfaces, host_addresses
from hpctrain.world import World, report_without_traceback

log = logging.getLogger(__name__)
CONNECT_S = 2.0  #: time for one address of rank 0 to answer; the next is tried after it
Rendezvous = Iterator[tuple[dist.Store, int, int]]


def choose_ranks(url: str) -> Choice:
    """Return whose ranks the process group has; raise UsageError if it can have none.

    The children of a process that a launcher has started are no ranks: they have what they set.
    """
    is_own_backend = _requested_backend() == BACKEND
    if parent_process() is not None and not is_own_backend:
        return Choice("pytorch")
    query = {name.upper(): values[0] for name, values in parse_qs(urlparse(url).query).items()}
    arguments = {name: query[name] for name in torchrun.REQUIRED[:2] if name in query}
    inherited = {**_start_environment(), **ranks.variables}
    choice = torchrun.choose_ranks(os.environ, is_own_backend, arguments, inherited)
    if choice.source == "refused":
        raise UsageError(choice.text)
    return choice


def _requested_backend() -> str | None:
    """Return the `backend` of the `init_process_group` under way; handlers are not given it."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code.co_name == "init_process_group":
            return str(frame.f_locals.get("backend"))
    return None


def _start_environment() -> dict[str, str]:
    """Return the environment with which the launcher has started this rank; {} for no launcher.

    The script's process may be a child of the rank that was started, as behind a shell.
    """
    own, number, environ = launchers.launched(os.environ), str(os.getpid()), dict[str, str]()
    while own.name != "none" and (start := _read_environment(number)):
        if launchers.launched(start) != own:
            break
        environ, number = start, _parent(number)
    return environ


def _read_environment(number: str) -> dict[str, str]:
    """Return the variables with which a process was started; {} if they are not readable."""
    try:
        entries = Path("/proc", number, "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = [os.fsdecode(entry).partition("=") for entry in entries]
    return {name: value for name, _, value in pairs if name}


def _parent(number: str) -> str:
    try:
        return Path("/proc", number, "stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return "0"


def over_mpi(choice: Choice, timeout: timedelta | None = None, **_: Any) -> Rendezvous:
    """Yield (store, rank, size) of this job; collective over all ranks."""
    job = start_job(timeout)
    if job.size == 1 and launchers.launched(os.environ).name == "none":
        log.warning("hpctrain: 1 rank: no launcher has started this script, such as mpirun or srun")
    rank = _agree_on_rank(job, choice)
    rank_variables = {"RANK": rank, "WORLD_SIZE": job.size, "LOCAL_RANK": job.local_rank}
    os.environ.update({name: str(rank_variables[name]) for name in choice.stale})
    local_rank = {"LOCAL_RANK": job.local_rank, "LOCAL_WORLD_SIZE": job.node.size}
    for name, value in local_rank.items():  # `dist.get_node_local_rank` reads it
        os.environ.setdefault(name, str(value))
    if len(set(job.hosts)) > 1 and not is_any(job.link, not fast_interfaces()):
        ranks.set_interfaces()
    yield _make_store(job, timeout or timedelta(minutes=30)), rank, job.size
    raise RuntimeError("the rendezvous over MPI cannot be repeated in this call")


def _agree_on_rank(job: World, choice: Choice) -> int:
    """Return this rank's number, the script's or MPI's; rank 0 warns of stale variables.

    Collective. Raises UsageError unless the ranks' numbers are 0 to P - 1, each once.
    """
    warnings = broadcast_first(job.link, choice.text.encode() or None, limit=1)
    if job.rank == 0 and warnings:
        log.warning("hpctrain: %s", next(iter(warnings.values())).decode())
    rank_texts = job.gather(choice.rank or str(job.rank))
    if sorted(rank_texts) != sorted(map(str, range(job.size))):
        error = UsageError(
            f"expected each of the ranks 0 to {job.size - 1} once, seen {', '.join(rank_texts)}: "
            "unset RANK, or leave the argument rank out"
        )
        report_without_traceback(error)
        raise error
    return int(rank_texts[job.rank])


def _make_store(job: World, timeout: timedelta) -> dist.Store:
    """Return this rank's view of the store that rank 0 serves; collective."""
    if job.size == 1:
        return dist.HashStore()
    server = None
    if job.rank == 0:
        server = dist.TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False)
    own_addresses = dict.fromkeys([*fast_addresses(), *host_addresses()])
    own_line = f"{server.port} {' '.join(own_addresses)}" if server is not None else ""
    port, *addresses = job.from_first(lambda: own_line).split()
    if server is not None:
        server.set_timeout(timeout)
        return server
    if job.hosts[0] == job.host:
        addresses.insert(0, "127.0.0.1")
    address = _first_reachable(addresses, int(port), job)
    return dist.TCPStore(address, int(port), None, is_master=False, timeout=timeout)


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
