"""Optimizers, which are pairs of functions on flat arrays, and learning-rate schedules."""

from typing import Any

from hpctrain.core.lazy import lazy_names
from hpctrain.optim import schedules
from hpctrain.optim.adamw import AdamWOptions, adamw
from hpctrain.optim.lamb import LambOptions, lamb
from hpctrain.optim.lars import LarsOptions, lars
from hpctrain.optim.optimizer import Optimizer
from hpctrain.optim.schedules import ConstantOptions, CosineOptions, StepOptions
from hpctrain.optim.sgd import SgdOptions, sgd

OPTIMIZERS: dict[str, Any] = {
    "sgd": SgdOptions,
    "adamw": AdamWOptions,
    "lars": LarsOptions,
    "lamb": LambOptions,
}
SCHEDULES: dict[str, Any] = {
    "constant": ConstantOptions,
    "cosine": CosineOptions,
    "step": StepOptions,
}

__getattr__ = lazy_names(__name__, {})  # for the nearest name in the error

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "AdamWOptions",
    "ConstantOptions",
    "CosineOptions",
    "LambOptions",
    "LarsOptions",
    "Optimizer",
    "SgdOptions",
    "StepOptions",
    "adamw",
    "lamb",
    "lars",
    "schedules",
    "sgd",
]
