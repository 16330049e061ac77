"""hpctrain: training neural networks with MPI, every regime behind one interface.

Importing this package imports none of its modules: each is imported on first use (PEP 562). It
starts no MPI and loads no CuPy; `init` does, once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain import data, engines, jax, nn, optim, parallel, torch
    from hpctrain.cluster import jobs as slurm
    from hpctrain.cluster.function_call import launch
    from hpctrain.nn import metrics
    from hpctrain.training import callbacks, loggers
    from hpctrain.training.run_options import CheckpointOptions, ElasticOptions, FitOptions
    from hpctrain.training.runs import load
    from hpctrain.training.trainer import Trainer
    from hpctrain.world import World, init
    from hpctrain.world.calls.calls import (
        all_gather,
        all_to_all,
        allreduce,
        barrier,
        bind,
        broadcast,
        gather,
        reduce,
        reduce_scatter,
        scatter,
    )

__version__ = "0.1.0"

__all__ = [
    "CheckpointOptions",
    "ElasticOptions",
    "FitOptions",
    "Trainer",
    "World",
    "all_gather",
    "all_to_all",
    "allreduce",
    "barrier",
    "bind",
    "broadcast",
    "callbacks",
    "data",
    "engines",
    "gather",
    "init",
    "jax",
    "launch",
    "load",
    "loggers",
    "metrics",
    "nn",
    "optim",
    "parallel",
    "reduce",
    "reduce_scatter",
    "scatter",
    "slurm",
    "torch",
]

_MODULE_OF = {
    "CheckpointOptions": "hpctrain.training.run_options",
    "ElasticOptions": "hpctrain.training.run_options",
    "FitOptions": "hpctrain.training.run_options",
    "Trainer": "hpctrain.training.trainer",
    "World": "hpctrain.world",
    "init": "hpctrain.world",
    "launch": "hpctrain.cluster.function_call",
    "load": "hpctrain.training.runs",
}
_PACKAGES = {"data", "engines", "jax", "nn", "optim", "parallel", "torch"}
_MODULES = {
    "callbacks": "hpctrain.training.callbacks",
    "loggers": "hpctrain.training.loggers",
    "metrics": "hpctrain.nn.metrics",
    "slurm": "hpctrain.cluster.jobs",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        from hpctrain.core.lazy import NoAttributeError

        raise NoAttributeError("hpctrain", name)
    if name in _PACKAGES | _MODULES.keys():
        return import_module(_MODULES.get(name, f"hpctrain.{name}"))
    value = getattr(import_module(_MODULE_OF.get(name, "hpctrain.world.calls.calls")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
