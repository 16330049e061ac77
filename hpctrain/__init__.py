"""hpctrain: training neural networks with MPI, every regime behind one interface.

Importing this package starts no MPI and loads no CuPy; `init` does, once.
"""

from hpctrain import data, engines, nn, optim
from hpctrain.errors import HpctrainError
from hpctrain.runs import load
from hpctrain.trainer import Trainer
from hpctrain.world import World, allreduce, init

__version__ = "0.1.0"

__all__ = [
    "HpctrainError",
    "Trainer",
    "World",
    "__version__",
    "allreduce",
    "data",
    "engines",
    "init",
    "load",
    "nn",
    "optim",
]
