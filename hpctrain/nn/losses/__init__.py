"""Losses: the sum of the error over targets, its gradient, and the metrics of a set.

loss.py     the interface           sums.py     sums over targets, by name
cross_entropy.py, mean_squared_error.py, binary_cross_entropy.py
"""

from __future__ import annotations

from typing import Any

from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.nn.losses.binary_cross_entropy import binary_cross_entropy
from hpctrain.nn.losses.cross_entropy import (
    CrossEntropy,
    as_class_weights,
    balanced_class_weights,
    count_classes,
    cross_entropy,
)
from hpctrain.nn.losses.loss import Loss, evaluate
from hpctrain.nn.losses.mean_squared_error import mean_squared_error
from hpctrain.nn.losses.sums import (
    PendingSums,
    Sums,
    Total,
    add,
    pack,
    unpack,
    wait_for_sums,
    zero_sums,
)

__all__ = [
    "LOSSES",
    "CrossEntropy",
    "Loss",
    "PendingSums",
    "Sums",
    "Total",
    "add",
    "as_class_weights",
    "as_loss",
    "balanced_class_weights",
    "binary_cross_entropy",
    "count_classes",
    "cross_entropy",
    "evaluate",
    "mean_squared_error",
    "pack",
    "unpack",
    "wait_for_sums",
    "zero_sums",
]

#: The losses by the `kind` of a recipe's table [loss].
LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "mean_squared_error": mean_squared_error,
    "binary_cross_entropy": binary_cross_entropy,
}


def as_loss(loss: Any) -> Loss:
    """Return `loss`, or the loss of this name; raise UsageError for anything else."""
    if isinstance(loss, str):
        return config.pick(LOSSES, loss, "loss")
    if callable(loss) and all(hasattr(loss, name) for name in ("terms", "metrics", "find_fault")):
        return loss
    raise UsageError(f"loss: expected a name ({', '.join(LOSSES)}) or an ht.nn.Loss, seen {loss!r}")
