"""The World: ranks, hosts, device, links; its start over MPI, and its end."""

from hpctrain.world.process import DEFAULT_TIMEOUT_S, current_world, fail_alone, finish, init
from hpctrain.world.world import World, over_threads

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "World",
    "current_world",
    "fail_alone",
    "finish",
    "init",
    "over_threads",
]
