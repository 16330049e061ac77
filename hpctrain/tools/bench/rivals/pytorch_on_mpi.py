"""PyTorch on our collectives: DistributedDataParallel on our backend, and ht.torch.sync.

They offer no operation: their collectives are ours, which are measured anyway.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpctrain.tools.bench.rivals.training import TorchRival
from hpctrain.torch import sync
from hpctrain.world import World


class Sync(TorchRival):
    """A loop with `ht.torch.sync`."""

    def __init__(self, world: World):
        """Compute in one thread, as other contenders do."""
        torch.set_num_threads(1)
        self.about = f"torch {torch.__version__} on hpctrain's collectives, 1 thread"

    def wrap(self, network: Any, optimizer: Any) -> tuple[Any, Any]:
        """Return both as they are, once `sync` has registered its hooks."""
        sync(network, optimizer)
        return network, optimizer


class Ddp(Sync):
    """DistributedDataParallel on the backend hpctrain."""

    def __init__(self, world: World):
        super().__init__(world)
        self._owns_processes = not dist.is_initialized()
        if self._owns_processes:
            dist.init_process_group("hpctrain")
        self._group = dist.new_group(backend="hpctrain")

    def wrap(self, network: Any, optimizer: Any) -> tuple[Any, Any]:
        """Return the network in DistributedDataParallel, and the optimizer as it is."""
        ddp_network = DistributedDataParallel(
            network, process_group=self._group, gradient_as_bucket_view=True
        )
        return ddp_network, optimizer

    def close(self) -> None:
        """Leave the process group; with Gloo, which closes first, it has ended already."""
        if self._owns_processes:
            dist.destroy_process_group()
