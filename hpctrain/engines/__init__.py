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
from hpctrain.errors import UsageError
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
    workers = len(options.roles(ranks).workers) if isinstance(options, ServerOptions) else ranks
    if isinstance(options, Single | AllReduce | Gossip | PsSync | PsAsync):
        options.must_fit(workers)
    return workers


def blocks_of(options: Any, workers: int) -> int:
    """Return the parts that a batch is cut into, of which each worker has whole ones: one each,
    or as many on any number of workers where sums are ordered."""
    tree = options.tree(workers) if isinstance(options, ReductionOptions) else None
    return tree.blocks if tree else workers


def must_fit(options: Any, ranks: int, batch: int, samples: int | None = None) -> None:
    """Raise UsageError where `ranks` cannot train by the regime, or some would have nothing to do.

    Each worker, or block of an ordered sum, needs one of the `batch` samples of a step at least,
    and of the `samples` of the training set, where they are known.
    """
    workers = workers_of(options, ranks)
    blocks = blocks_of(options, workers)
    least = batch if samples is None else min(samples, batch)
    if least >= blocks:
        return
    what = "training samples" if least < batch else "samples per batch"
    whom, then = "workers", "start fewer ranks"
    if blocks != workers:
        whom, then = "blocks of an ordered sum", "set [wire] blocks lower"
    raise UsageError(f"{least} {what} for {blocks} {whom}: each needs at least one; {then}")


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
    "must_fit",
    "updates_per_step",
    "workers_of",
]
