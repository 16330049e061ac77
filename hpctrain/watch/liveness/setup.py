"""Set up the observation of a job: identities of its processes, addresses, the key, the ring."""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hpctrain.watch.liveness.channel import Channel, Endpoint, choose_addresses, host_addresses
from hpctrain.watch.liveness.datagrams import KEY_BYTES
from hpctrain.watch.liveness.host_ring import HostRing
from hpctrain.watch.liveness.observer import LivenessObserver
from hpctrain.watch.liveness.processes import ProcessIdentity, kill, own_identity
from hpctrain.watch.liveness.stopped_ranks import LIMIT_S, StoppedRanks
from hpctrain.watch.record import WatchRecord

log = logging.getLogger(__name__)
Gather = Callable[[bytes], list[bytes]]  #: of all ranks' bytes


@dataclass(frozen=True)
class Identities:
    """Processes of the ranks and addresses of their hosts, by rank, and the key of the job."""

    processes: tuple[ProcessIdentity, ...]
    addresses: tuple[tuple[str, ...], ...]  #: of each rank's host; none if the job has one host
    key: bytes  #: of datagrams, drawn by rank 0

    @classmethod
    def exchange(cls, rank: int, hosts: Sequence[str], gather: Gather) -> Identities:
        """Gather the identities of all ranks; collective. `hosts`: the node of each rank."""
        rows = _gather_rows(
            gather,
            process=str(own_identity()),
            addresses=host_addresses() if len(set(hosts)) > 1 else [],
            key=secrets.token_hex(KEY_BYTES) if rank == 0 else "",
        )
        return cls(
            tuple(ProcessIdentity.parse(row["process"]) for row in rows),
            tuple(tuple(row["addresses"]) for row in rows),
            bytes.fromhex(rows[0]["key"]),
        )

    def of(self, ranks: Sequence[int]) -> Identities:
        """Select the identities of some ranks, in their order, with a new key.

        Datagrams sent before a loss are rejected after it.
        """
        processes, addresses = zip(
            *((self.processes[rank], self.addresses[rank]) for rank in ranks), strict=True
        )
        key = hmac.digest(self.key, repr(tuple(ranks)).encode(), "sha256")
        return Identities(processes, addresses, key)


@dataclass(frozen=True)
class LossReports:
    """Consequences of a loss; called in the observer's thread."""

    on_lost_rank: Callable[[int, str], None]  #: SIGKILL does not end it, so MPI must be told
    on_dead_host: Callable[[str, str], None]  #: MPI must be told that all its ranks are lost
    #: The ranks of this host end, by SIGKILL and exit code 1, when this returns: it reports why.
    on_cut_off: Callable[[str], None]


def observe_liveness(
    record: WatchRecord,
    rank: int,
    hosts: Sequence[str],
    identities: Identities,
    gather: Gather,
    step: Callable[[], int],
    reports: LossReports,
    least_limit_s: float = LIMIT_S,
) -> LivenessObserver:
    """Return the running observer of this `rank`; collective if there are several hosts.

    Only for jobs that survive losses. `gather` is over all surviving ranks; `hosts` has the node of
    each rank. Ranks whose records share memory with `record` observe each other. `step()`: the
    training step that is under way.
    """
    neighbours = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    processes = {r: identities.processes[r] for r in neighbours}
    reports = replace(reports, on_cut_off=partial(_end_host, reports, rank, processes))
    channel = _open_channel(rank, hosts, identities.addresses)
    ring = _join_ring(rank, hosts, gather, channel, identities.key, reports)
    return LivenessObserver(
        partial(read_heartbeats, record, processes),
        StoppedRanks(rank, processes),
        step,
        reports.on_lost_rank,
        ring,
        channel,
        least_limit_s,
    )


def read_heartbeats(
    record: WatchRecord, processes: Mapping[int, ProcessIdentity]
) -> dict[int, float]:
    """Return the heartbeats of this node's ranks, whose records may have earlier numbers, or none.

    So ranks are known by their pids.
    """
    ranks = {process.pid: rank for rank, process in processes.items()}
    heartbeats = record.node_heartbeats()
    return {ranks[pid]: heartbeat for pid, heartbeat in heartbeats.items() if pid in ranks}


def _gather_rows(gather: Gather, **row: Any) -> list[dict[str, Any]]:
    return [json.loads(raw) for raw in gather(json.dumps(row).encode())]


def _leaders(hosts: Sequence[str]) -> list[int]:
    """Return the first rank of each host, in order."""
    return [hosts.index(host) for host in dict.fromkeys(hosts)]


def _open_channel(
    rank: int, hosts: Sequence[str], addresses: Sequence[Sequence[str]]
) -> Channel | None:
    """Return the sockets of a host's first rank; None on other ranks, and for a single host."""
    leaders = _leaders(hosts)
    chosen = choose_addresses([addresses[leader] for leader in leaders])
    if len(leaders) == 1 or rank not in leaders or not chosen:
        return None
    try:
        return Channel(chosen[leaders.index(rank)])
    except OSError:
        return None


def _join_ring(
    rank: int,
    hosts: Sequence[str],
    gather: Gather,
    channel: Channel | None,
    key: bytes,
    reports: LossReports,
) -> HostRing | None:
    """Return the ring of a rank that leads a host; collective if there are several hosts."""
    leaders = _leaders(hosts)
    if len(leaders) == 1:
        return None
    rows = _gather_rows(gather, endpoint=None if channel is None else channel.endpoint)
    endpoints = [rows[leader]["endpoint"] for leader in leaders]
    if not all(endpoints) and rank == 0:
        log.warning(
            "dead hosts will not be detected: no socket for heartbeats on %s, at an address that "
            "no other host has",
            ", ".join(hosts[r] for r in leaders if not rows[r]["endpoint"]),
        )
    if channel is None or not all(endpoints):
        return None

    def report_dead(number: int) -> None:
        host = hosts[leaders[number]]
        reports.on_dead_host(host, f"host {host}: no heartbeat, and its kernel answers no host")

    def report_cut_off() -> None:
        reports.on_cut_off(f"host {hosts[rank]} does not reach more than half of the job's hosts")

    places = [Endpoint(*endpoint) for endpoint in endpoints]
    return HostRing(channel, key, leaders.index(rank), places, report_dead, report_cut_off)


def _end_host(
    reports: LossReports, rank: int, processes: Mapping[int, ProcessIdentity], reason: str
) -> None:
    """End the ranks of this host, which the other hosts may count as lost already."""
    try:
        reports.on_cut_off(reason)
    finally:
        for other in processes.keys() - {rank}:
            kill(processes[other])
        os._exit(1)
