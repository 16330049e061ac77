"""The mean squared error, for targets that are real numbers.

r2 is a share of the variance of the targets, which comes from sums of t - c and (t - c)^2, with a
number c near the mean that is the same in all sums (Chan, Golub and LeVeque, 1983). With c = 0 it
would be the small difference of two large numbers where the mean is large.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any, ClassVar

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array
from hpctrain.nn.layer import Shape
from hpctrain.nn.losses.loss import Metric, find_shape_fault, make_sums, mean
from hpctrain.nn.losses.sums import PendingSums, Sums, Total

CENTER_ROWS = 1024  #: whose mean is near enough to the mean of the set


def _r2(sums: Sums) -> float | None:
    """The share of the targets' variance that is explained; None for several features."""
    loss, targets, squares = sums["loss"], sums["target"], sums["target_squared"]
    variation = squares.sum - targets.sum**2 / targets.count
    return 1 - loss.sum / variation if targets.count == loss.count and variation > 0 else None


@dataclass(frozen=True)
class MeanSquaredError:
    """The squared error, a mean over the last axis of the outputs (n, ..., features).

    Targets have the shape of the outputs; for one feature they may be (n, ...). Each vector of
    features counts as one target. The metrics `rmse` and, for one feature, `r2`, the coefficient of
    determination, are over all targets of a set.
    """

    offset: float = 0.0  #: of the targets in sums; see `centered`

    terms = ("loss", "target", "target_squared")
    task = "numbers"
    metrics: ClassVar[Mapping[str, Metric]] = {
        "loss": mean("loss"),
        "rmse": lambda sums: sqrt(sums["loss"].sum / sums["loss"].count),
        "r2": _r2,
    }

    def __call__(
        self, outputs: Array, targets: Array, scale: float | None = None
    ) -> tuple[Sums | PendingSums, Array | None]:
        """Return the sums, and the gradient of `scale` times the error; see Loss.

        Raises UsageError if the shapes do not fit.
        """
        if fault := find_shape_fault(targets, outputs.shape[1:], "mean_squared_error"):
            raise UsageError(fault)
        features = outputs.shape[-1]
        error = outputs - targets.reshape(outputs.shape).astype(outputs.dtype, copy=False)
        wide_targets = targets.astype(np.float64, copy=False) - self.offset
        totals = [
            (error * error).sum(dtype="float64") / features,
            wide_targets.sum(),
            (wide_targets * wide_targets).sum(),
        ]
        sums = make_sums(totals, partial(_name_sums, outputs.size // features, outputs.size))
        if scale is None:
            return sums, None
        error *= 2 * scale / features
        return sums, error

    def centered(self, targets: Any) -> MeanSquaredError:
        """Return this loss with the mean of the first targets (n, ...) as the offset of sums."""
        return replace(self, offset=float(targets[:CENTER_ROWS].mean(dtype="float64")))

    def find_fault(self, targets: Any, output_shape: Shape) -> str:
        """Return the fault of targets with another shape than the outputs; see Loss."""
        return find_shape_fault(targets, output_shape, "mean_squared_error")

    def count_outputs(self, targets: Any) -> int:
        """Return the number of features."""
        return 1 if targets.ndim == 1 else targets.shape[-1]

    def __repr__(self) -> str:
        return "mean_squared_error"


def _name_sums(count: int, elements: int, loss: float, target: float, squares: float) -> Sums:
    return {
        "loss": Total(loss, count),
        "target": Total(target, elements),
        "target_squared": Total(squares, elements),
    }


mean_squared_error = MeanSquaredError()
