"""The interface of losses: the error summed over targets, its gradient, and the metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from hpctrain.core.xp import Array, fetch, namespace, on_device
from hpctrain.nn.layer import Shape
from hpctrain.nn.losses.sums import PendingSums, Sums

#: Computes a metric from the sums over a set; None where it is not defined.
Metric = Callable[[Sums], "float | None"]


class Loss(Protocol):
    """A function of outputs and targets; instances are frozen, and ranks may share them."""

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the sums, in a fixed order, with "loss"."""

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """The metrics by name: "loss" becomes train_loss and test_loss in rows and summaries."""

    def __call__(
        self, outputs: Array, targets: Any, scale: float | None = None
    ) -> tuple[Sums | PendingSums, Array | None]:
        """Return the sums over a batch, and the gradient of `scale` times the sum of the loss.

        `outputs` is (n, ..., features), float32 or float64, and is not written. The gradient is a
        new array like `outputs`, None if `scale` is None.
        """

    def find_fault(self, targets: Any, output_shape: Shape) -> str:
        """Return the first fault of `targets` (n, ...) on the host; empty if they are valid.

        `output_shape` is the shape of the model's output for one sample.
        """

    def count_outputs(self, targets: Any) -> int:
        """Return the number of outputs (the last dim) that a model for `targets` needs."""


def mean(name: str) -> Metric:
    """Return the metric that is the mean of the sum `name`."""
    return lambda sums: sums[name].mean


def evaluate(loss: Loss, sums: Sums, prefix: str = "") -> dict[str, float | None]:
    """Return the value of each metric of `loss` by `prefix` and name; None over no targets."""
    has_targets = "loss" in sums and sums["loss"].count > 0
    return {
        f"{prefix}{name}": metric(sums) if has_targets else None
        for name, metric in loss.metrics.items()
    }


def make_sums(numbers: list[Array], to_sums: Callable[..., Sums]) -> Sums | PendingSums:
    """Return `to_sums(*numbers)` for numbers of shape (), of the host or of a device."""
    if not on_device(numbers[0]):
        return to_sums(*map(float, numbers))
    xp = namespace(numbers[0])
    device_numbers = xp.zeros(len(numbers), np.float64)
    for i, number in enumerate(numbers):
        device_numbers[i] = number
    return PendingSums(fetch(device_numbers), to_sums)


def find_shape_fault(targets: Any, output_shape: Shape, loss: str) -> str:
    """Return the fault of targets unlike the outputs; for one feature they may be (n, ...)."""
    if isinstance(targets, dict | tuple):
        return f"{loss}: expected one array of targets, seen a {type(targets).__name__} of arrays"
    shapes = {output_shape, output_shape[:-1]} if output_shape[-1] == 1 else {output_shape}
    if targets.shape[1:] in shapes:
        return ""
    return (
        f"{loss}: expected targets (n, {', '.join(map(str, output_shape))}), as the model's "
        f"outputs, seen {targets.shape}"
    )
