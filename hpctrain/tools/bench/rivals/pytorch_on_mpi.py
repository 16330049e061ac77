"""PyTorch on our collectives: DistributedDataParallel on our backend, and ht.torch.sync."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpctrain.tools.bench.rivals import DenseModel, StepFunction
from hpctrain.tools.bench.rivals.training import make_step
from hpctrain.torch import sync
from hpctrain.world import World


class PyTorchOnMpi:
    """The base of both; see `hpctrain.tools.bench.rivals.Rival`."""

    def __init__(self, world: World):
        """Compute in one thread, as other contenders do."""
        torch.set_num_threads(1)
        self.about = f"torch {torch.__version__} on hpctrain's collectives, 1 thread"

    def offers(self, operation: str, dtype: np.dtype) -> bool:
        """Return False: its collectives are ours, which are measured anyway."""
        return False

    def call(self, operation: str, x: np.ndarray, op: str) -> Callable[[], None]:
        """Not called: no operation is offered."""
        raise NotImplementedError

    def awake_context(self) -> AbstractContextManager[None]:
        """Return a context manager that does nothing: no thread of it is awake between calls."""
        return nullcontext()

    def step(self, dense: DenseModel, without_communication: bool) -> StepFunction:
        """Return a step that reduces gradients during backward."""
        return make_step(dense, _leave_unwrapped if without_communication else self._wrap)

    def _wrap(self, network: Any, optimizer: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing."""


class Sync(PyTorchOnMpi):
    """A loop with `ht.torch.sync`."""

    def _wrap(self, network: Any, optimizer: Any) -> tuple[Any, Any]:
        sync(network, optimizer)
        return network, optimizer


class Ddp(PyTorchOnMpi):
    """DistributedDataParallel on the backend hpctrain."""

    def __init__(self, world: World):
        super().__init__(world)
        self._owns_processes = not dist.is_initialized()
        if self._owns_processes:
            dist.init_process_group("hpctrain")
        self._group = dist.new_group(backend="hpctrain")

    def _wrap(self, network: Any, optimizer: Any) -> tuple[Any, Any]:
        wrapped = DistributedDataParallel(
            network, process_group=self._group, gradient_as_bucket_view=True
        )
        return wrapped, optimizer

    def close(self) -> None:
        """Leave the process group; with Gloo, which closes first, it has ended already."""
        if self._owns_processes:
            dist.destroy_process_group()


def _leave_unwrapped(network: Any, optimizer: Any) -> tuple[Any, Any]:
    return network, optimizer
