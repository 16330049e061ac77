"""Threads: Worlds whose ranks are threads of a process, and spare cores for communication."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from hpctrain.collectives import all_gather_bytes
from hpctrain.collectives.small_messages import is_any
from hpctrain.transport.link import Link
from hpctrain.transport.paths import RankPlace
from hpctrain.world.job import Job
from hpctrain.world.world import World, make_world


def over_threads(link: Link, hosts: Sequence[str] = (), spares: int = 0) -> World:
    """Return the World of a rank that is a thread, see transport/threads/link.py; collective.

    `hosts` of the ranks may be invented: ranks with the same host are a node. The last `spares`
    ranks wait, see Job.
    """
    hosts = hosts or (socket.gethostname(),) * link.size
    places = tuple(RankPlace(host) for host in hosts)
    survives = link.endpoint.survivors.survives
    return make_world(link, places, Job.of_ranks(link, places, spares) if survives else None)


def has_spare_cores(world: World) -> bool:
    """Return whether every node has more cores than ranks; collective."""
    own_cores = " ".join(map(str, os.sched_getaffinity(0))).encode()
    cores = set().union(*(text.split() for text in all_gather_bytes(world.node, own_cores)))
    return not is_any(world.link, len(cores) <= world.node.size)
