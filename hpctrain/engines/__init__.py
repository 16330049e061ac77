"""The options of each training regime, by name; `engine.py` has the interface of engines.

A regime's modules are imported when it is picked.
"""

from typing import TYPE_CHECKING

from hpctrain.core.errors import UsageError
from hpctrain.core.lazy import LazyTable, lazy_names
from hpctrain.engines.engine import Engine, Flags, Task, Times, Work
from hpctrain.engines.options import EngineOptions

if TYPE_CHECKING:
    from hpctrain.engines.gossip.options import Gossip
    from hpctrain.engines.local_sgd.engine import LocalSgd
    from hpctrain.engines.parameter_server.async_ import PsAsync
    from hpctrain.engines.parameter_server.easgd import Easgd
    from hpctrain.engines.parameter_server.sync import PsSync
    from hpctrain.engines.synchronous.allreduce import AllReduce
    from hpctrain.engines.synchronous.single import Single

#: The options class of each regime, by the name on the command line; `build` returns the engine.
ENGINES = LazyTable(
    __name__,
    {
        "single": "Single",
        "allreduce": "AllReduce",
        "ps-sync": "PsSync",
        "ps-async": "PsAsync",
        "local-sgd": "LocalSgd",
        "easgd": "Easgd",
        "gossip": "Gossip",
    },
)
__getattr__ = lazy_names(
    __name__,
    {
        "AllReduce": "synchronous.allreduce",
        "Easgd": "parameter_server.easgd",
        "Gossip": "gossip.options",
        "LocalSgd": "local_sgd.engine",
        "PsAsync": "parameter_server.async_",
        "PsSync": "parameter_server.sync",
        "Single": "synchronous.single",
    },
)


def blocks_of(options: EngineOptions, workers: int) -> int:
    """Return the number of parts into which a batch is cut; each worker computes whole parts.

    There is one part per worker; with ordered sums the number does not depend on the workers.
    """
    tree = options.tree(workers)
    return tree.blocks if tree else workers


def must_fit(options: EngineOptions, ranks: int, batch: int, samples: int | None = None) -> None:
    """Raise UsageError if `ranks` do not fit the regime, or if one would compute no sample.

    Each worker, or each block of an ordered sum, needs at least one of the `batch` samples of a
    step. A training set of fewer `samples` limits the batch.
    """
    workers = options.workers(ranks)
    blocks = blocks_of(options, workers)
    count = batch if samples is None else min(samples, batch)
    if count >= blocks:
        return
    unit = "training samples" if count < batch else "samples per batch"
    receivers, remedy = "workers", "start fewer ranks"
    if blocks != workers:
        receivers, remedy = "blocks of an ordered sum", "set [wire] blocks lower"
    raise UsageError(f"{count} {unit} for {blocks} {receivers}: each needs at least one; {remedy}")


def updates_per_step(options: EngineOptions, ranks: int) -> float:
    """Return the optimizer's updates per step; its learning-rate schedule counts updates."""
    return options.updates_per_step(options.workers(ranks))


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
]
