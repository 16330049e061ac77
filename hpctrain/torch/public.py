"""The names of `ht.torch` that need PyTorch."""

from hpctrain.torch.modules.losses import TorchLoss as Loss
from hpctrain.torch.modules.trainer import Trainer

__all__ = ["Loss", "Trainer"]
