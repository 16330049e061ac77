"""Spare cores: a communication thread runs on a core that no rank computes on."""

from __future__ import annotations

import os

from hpctrain.world.world import World


def has_spare_cores(world: World) -> bool:
    """Return whether every node has more cores than ranks; collective."""
    cores = world.gather(" ".join(map(str, os.sched_getaffinity(0))))
    return all(
        len(set().union(*(cores[rank].split() for rank in node))) > len(node)
        for node in world.main.nodes
    )
