"""hpctrain: training neural networks with MPI, every regime behind one interface.

Importing this package starts no MPI and loads no CuPy; `init` does, once.
"""

from hpctrain import data, engines, nn, optim
from hpctrain.arrays import (
    all_gather,
    all_to_all,
    allreduce,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from hpctrain.runs import load
from hpctrain.trainer import Trainer
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
