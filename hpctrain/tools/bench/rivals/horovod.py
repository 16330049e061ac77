"""Horovod over MPI, with PyTorch tensors; built by benchmarks/install_horovod.sh."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import horovod
import horovod.torch as hvd
import numpy as np
import torch

from hpctrain.tools.bench.rivals.training import TorchRival
from hpctrain.world import World

OPERATIONS = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}


class Horovod(TorchRival):
    """DistributedOptimizer and collectives of Horovod."""

    def __init__(self, world: World):
        """Record version and settings; Horovod itself starts in `awake_context`."""
        torch.set_num_threads(1)
        cycle_time = os.environ.get("HOROVOD_CYCLE_TIME", "1 (default)")
        self.about = (
            f"horovod {horovod.__version__}, torch {torch.__version__}, cycle {cycle_time} ms"
        )

    def offers(self, operation: str, dtype: np.dtype) -> bool:
        """Return whether Horovod supports `operation` in place on `dtype`."""
        return operation in ("allreduce", "broadcast") and dtype.name != "bfloat16"

    def call(self, operation: str, x: np.ndarray, op: str) -> Callable[[], None]:
        """Return a call on `x`'s own memory; Horovod's cache identifies the tensor by its name."""
        tensor, name = torch.from_numpy(x), f"{operation}-{x.size}"

        def allreduce() -> None:
            hvd.allreduce_(tensor, op=OPERATIONS[op], name=name)

        def broadcast() -> None:
            hvd.broadcast_(tensor, 0, name=name)

        return allreduce if operation == "allreduce" else broadcast

    @contextmanager
    def awake_context(self) -> Iterator[None]:
        """Run Horovod's thread on the MPI that is already initialized.

        It polls all ranks for work every millisecond, waiting in MPI, and so takes the cores from
        other contenders. Start and stop take 1 ms each. Unlike Gloo it is faster on a core of its
        own: its threads wait without sleeping.
        """
        hvd.init()
        try:
            yield
        finally:
            hvd.shutdown()

    def wrap(self, network: Any, optimizer: Any) -> tuple[Any, Any]:
        """Return the network as it is, and the optimizer in DistributedOptimizer."""
        parameters = network.named_parameters()
        return network, hvd.DistributedOptimizer(optimizer, named_parameters=parameters)
