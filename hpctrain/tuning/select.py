"""`auto`: from (bytes, ranks) to an algorithm, the same on every rank."""

from __future__ import annotations

import numpy as np

from hpctrain import collectives, config
from hpctrain.collectives import AllReduceFunction, Group
from hpctrain.collectives.nccl import nccl
from hpctrain.collectives.operations import Operation
from hpctrain.transport.nccl import libraries
from hpctrain.tuning import cost

#: What a user may type for an all-reduce.
NAMES = ("auto", *collectives.ALLREDUCE, "nccl")


def fastest(n: int, ranks: int, machine: cost.Machine = cost.Machine()) -> str:  # noqa: B008
    """Return the algorithm that the cost model says is fastest for `n` bytes on `ranks` ranks."""
    return min(cost.ALLREDUCE, key=lambda name: machine.seconds(cost.ALLREDUCE[name](n, ranks)))


def auto(group: Group, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place by the algorithm that fits its length and the number of ranks."""
    collectives.ALLREDUCE[fastest(x.nbytes, group.link.size)](group, x, op)


def name_of(allreduce: AllReduceFunction, group: Group, nbytes: int) -> str:
    """Return the name of what `allreduce` does with `nbytes` bytes; for `auto`, what it takes."""
    if allreduce is auto:
        return fastest(nbytes, group.link.size)
    return getattr(allreduce, "__name__", "unknown").replace("_", "-")


def allreduce_named(name: str) -> AllReduceFunction:
    """Return the function that people call `name`; raise UsageError with the nearest name.

    Also where it is one that needs what is not installed here.
    """
    if name == "nccl":
        libraries()
    return config.pick({"auto": auto, **collectives.ALLREDUCE, "nccl": nccl}, name, "algorithm")
