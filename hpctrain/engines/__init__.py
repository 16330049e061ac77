"""Training regimes, one file each; the words are those of `engine.py`."""

from typing import Any

from hpctrain.core.errors import UsageError
from hpctrain.engines.engine import Engine, Flags, Task, Times, Work
from hpctrain.engines.gossip.options import Gossip
from hpctrain.engines.local_sgd.engine import LocalSgd
from hpctrain.engines.parameter_server.async_ import PsAsync
from hpctrain.engines.parameter_server.easgd import Easgd
from hpctrain.engines.parameter_server.roles import ServerOptions
from hpctrain.engines.parameter_server.sync import PsSync
from hpctrain.engines.synchronous.allreduce import AllReduce
from hpctrain.engines.synchronous.single import Single
from hpctrain.gradients.blocks import ReductionOptions

#: The options of each regime by its name on the command line; `build` returns the engine.
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
    """Return the number of workers among `ranks`; raise UsageError if the regime does not fit."""
    workers = len(options.roles(ranks).workers) if isinstance(options, ServerOptions) else ranks
    if isinstance(options, Single | AllReduce | Gossip | PsSync | PsAsync):
        options.must_fit(workers)
    return workers


def blocks_of(options: Any, workers: int) -> int:
    """Return the number of parts that a batch is cut into; each worker computes whole parts.

    One part per worker; with ordered sums a number of blocks that does not depend on the workers.
    """
    tree = options.tree(workers) if isinstance(options, ReductionOptions) else None
    return tree.blocks if tree else workers


def must_fit(options: Any, ranks: int, batch: int, samples: int | None = None) -> None:
    """Raise UsageError where `ranks` cannot train by the regime, or some would have nothing to do.

    Each worker, or block of an ordered sum, needs one of the `batch` samples of a step at least,
    and of the `samples` of the training set, where they are known.
    """
    workers = workers_of(options, ranks)
    blocks = blocks_of(options, workers)
    count = batch if samples is None else min(samples, batch)
    if count >= blocks:
        return
    unit = "training samples" if count < batch else "samples per batch"
    receivers, remedy = "workers", "start fewer ranks"
    if blocks != workers:
        receivers, remedy = "blocks of an ordered sum", "set [wire] blocks lower"
    raise UsageError(f"{count} {unit} for {blocks} {receivers}: each needs at least one; {remedy}")


def updates_per_step(options: Any, ranks: int) -> float:
    """Return the calls of the optimizer per step; its schedule counts these calls."""
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
