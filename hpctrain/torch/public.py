"""The names of `ht.torch` that need PyTorch."""

from hpctrain.torch.modules.losses import TorchLoss as Loss
from hpctrain.torch.modules.model import TorchModel as Model
from hpctrain.torch.modules.trainer import Trainer
from hpctrain.torch.synchronous import sync

__all__ = ["Loss", "Model", "Trainer", "sync"]
