"""Optimizers and schedules: pairs of functions on flat arrays."""

from typing import Any

from hpctrain.optim import schedules
from hpctrain.optim.adamw import AdamWOptions, adamw
from hpctrain.optim.optimizer import Optimizer
from hpctrain.optim.schedules import ConstantOptions, CosineOptions
from hpctrain.optim.sgd import SgdOptions, sgd

OPTIMIZERS: dict[str, Any] = {"sgd": SgdOptions, "adamw": AdamWOptions}
SCHEDULES: dict[str, Any] = {"constant": ConstantOptions, "cosine": CosineOptions}

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "AdamWOptions",
    "ConstantOptions",
    "CosineOptions",
    "Optimizer",
    "SgdOptions",
    "adamw",
    "schedules",
    "sgd",
]
