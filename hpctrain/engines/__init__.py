"""Training regimes, one file each; the words are those of `engine.py`."""

from typing import Any

from hpctrain.engines.allreduce import AllReduceOptions as AllReduce
from hpctrain.engines.easgd import EasgdOptions as Easgd
from hpctrain.engines.engine import Engine, Flags, Task, Times, Work
from hpctrain.engines.gossip import GossipOptions as Gossip
from hpctrain.engines.local_sgd import LocalSgdOptions as LocalSgd
from hpctrain.engines.ps_async import PsAsyncOptions as PsAsync
from hpctrain.engines.ps_sync import PsSyncOptions as PsSync
from hpctrain.engines.roles import ServerOptions
from hpctrain.engines.single import SingleOptions as Single
from hpctrain.gradients.blocks import ReductionOptions

#: The options of each regime by the name that people type; `build` makes the engine.
ENGINES = {
    "single": Single,
    "allreduce": AllReduce,
    "ps-sync": PsSync,
    "ps-async": PsAsync,
    "local-sgd": LocalSgd,
    "easgd": Easgd,
    "gossip": Gossip,
}


def workers_of(options: Any, ranks: int) -> int:
    """Return how many of `ranks` compute gradients; raise UsageError if the regime does not fit."""
    return len(options.roles(ranks).workers) if isinstance(options, ServerOptions) else ranks


def blocks_of(options: Any, workers: int) -> int:
    """Return the parts that a batch is cut into, of which each worker has whole ones: one each,
    or as many on any number of workers where sums are ordered."""
    tree = options.tree(workers) if isinstance(options, ReductionOptions) else None
    return tree.blocks if tree else workers


def updates_per_step(options: Any, ranks: int) -> float:
    """Return how often the optimizer is called per step, which its schedule counts by."""
    if isinstance(options, PsAsync):
        return options.updates_per_step(workers_of(options, ranks))
    return 1.0


__all__ = [
    "ENGINES",
    "AllReduce",
    "Easgd",
    "Engine",
    "Flags",
    "Gossip",
    "LocalSgd",
    "PsAsync",
    "PsSync",
    "Single",
    "Task",
    "Times",
    "Work",
    "blocks_of",
    "updates_per_step",
    "workers_of",
]
