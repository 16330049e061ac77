"""hpctrain: training neural networks with MPI, every regime behind one interface.

Importing this package starts no MPI and loads no CuPy; `init` does, once.
"""

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
