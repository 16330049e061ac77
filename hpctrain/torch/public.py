"""The names of `ht.torch` that need PyTorch."""

from hpctrain.core.errors import UsageError

try:
    import torch as _torch  # noqa: F401
except ImportError:
    raise UsageError("ht.torch needs PyTorch: pip install 'hpctrain[torch]'") from None

from hpctrain.torch.gradient_sync.synchronous import sync
from hpctrain.torch.modules.losses import TorchLoss as Loss
from hpctrain.torch.modules.model import TorchModel as Model
from hpctrain.torch.modules.trainer import Trainer
from hpctrain.torch.tensor_calls import (
    all_gather,
    all_to_all,
    allreduce,
    bind,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)

__all__ = [
    "Loss", "Model", "Trainer", "all_gather", "all_to_all", "allreduce", "bind", "broadcast",
    "gather", "reduce", "reduce_scatter", "scatter", "sync",
]  # fmt: skip
