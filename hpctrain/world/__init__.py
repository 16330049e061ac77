"""The World: ranks, hosts, device, links; its start over MPI, and its end."""

from hpctrain.world.node_records import watched
from hpctrain.world.process import (
    DEFAULT_TIMEOUT_S,
    current_world,
    fail_alone,
    finish,
    init,
    report_agreed,
    report_without_traceback,
)
from hpctrain.world.threads import has_spare_cores, over_threads
from hpctrain.world.world import World

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "World",
    "current_world",
    "fail_alone",
    "finish",
    "has_spare_cores",
    "init",
    "over_threads",
    "report_agreed",
    "report_without_traceback",
    "watched",
]
