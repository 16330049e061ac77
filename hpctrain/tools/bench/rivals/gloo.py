"""torch.distributed on Gloo, over TCP: PyTorch's usual backend on CPUs."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpctrain.tools.bench.rivals import TIMEOUT_S
from hpctrain.tools.bench.rivals.training import TorchRival
from hpctrain.transport.placement.core_binding import allow_all_cores
from hpctrain.world import World

OPERATIONS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class Gloo(TorchRival):
    """DistributedDataParallel and collectives of torch.distributed."""

    def __init__(self, world: World):
        """Join the other ranks through a store on a free port of rank 0."""
        torch.set_num_threads(1)
        timeout = timedelta(seconds=TIMEOUT_S)
        host = "127.0.0.1" if len(set(world.hosts)) == 1 else socket.getfqdn()
        with allow_all_cores():  # Gloo's threads
            store, open_store = None, partial(dist.TCPStore, world_size=world.size, timeout=timeout)
            if world.rank == 0:
                store = open_store(host, 0, is_master=True, wait_for_workers=False)
            address = world.from_first(lambda: (host, store.port if store else 0))
            store = store or open_store(*address, is_master=False)
            dist.init_process_group(
                "gloo", store=store, rank=world.rank, world_size=world.size, timeout=timeout
            )
        self.about = f"torch {torch.__version__}, Gloo, 1 thread, unbound"

    def offers(self, operation: str, dtype: np.dtype) -> bool:
        """Return whether torch supports `operation` in place on NumPy's arrays of `dtype`."""
        return operation != "reduce-scatter" and dtype.name != "bfloat16"

    def call(self, operation: str, x: np.ndarray, op: str) -> Callable[[], None]:
        """Return a call on `x`'s own memory."""
        tensor = torch.from_numpy(x)
        if operation == "allreduce":
            return partial(dist.all_reduce, tensor, OPERATIONS[op])
        if operation == "broadcast":
            return partial(dist.broadcast, tensor, 0)
        chunks = list(tensor.chunk(dist.get_world_size()))
        return partial(dist.all_gather, chunks, chunks[dist.get_rank()])

    def awake_context(self) -> AbstractContextManager[None]:
        """Return a context manager that unbinds this thread from its core.

        On the same core as Gloo's threads a call takes five times as long. Between calls Gloo's
        threads sleep.
        """
        return allow_all_cores()

    def wrap(self, network: Any, optimizer: Any) -> tuple[Any, Any]:
        """Return the network in DistributedDataParallel, and the optimizer as it is."""
        # Gradients are views of the buckets that are sent: otherwise DDP copies them.
        return DistributedDataParallel(network, gradient_as_bucket_view=True), optimizer

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()
