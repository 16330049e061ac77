"""hpctrain: training neural networks with MPI, every regime behind one interface.

Importing this package imports none of its modules: each is imported on first use (PEP 562). It
starts no MPI and loads no CuPy; `init` does, once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain import data, engines, nn, optim
    from hpctrain.training.runs import load
    from hpctrain.training.trainer import Trainer
    from hpctrain.user_collectives.calls import (
        all_gather,
        all_to_all,
        allreduce,
        broadcast,
        gather,
        reduce,
        reduce_scatter,
        scatter,
    )
    from hpctrain.world import init

__version__ = "0.1.0"

__all__ = [
    "Trainer",
    "all_gather",
    "all_to_all",
    "allreduce",
    "broadcast",
    "data",
    "engines",
    "gather",
    "init",
    "load",
    "nn",
    "optim",
    "reduce",
    "reduce_scatter",
    "scatter",
]

_PACKAGES = {"data", "engines", "nn", "optim"}
_MODULE_OF = {
    "Trainer": "hpctrain.training.trainer",
    "init": "hpctrain.world",
    "load": "hpctrain.training.runs",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hpctrain' has no attribute {name!r}")
    if name in _PACKAGES:
        return import_module(f"hpctrain.{name}")
    value = getattr(import_module(_MODULE_OF.get(name, "hpctrain.user_collectives.calls")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
