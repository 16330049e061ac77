"""The binary cross-entropy, for samples with any number of labels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, namespace
from hpctrain.nn.layer import Shape
from hpctrain.nn.losses.loss import Metric, find_shape_fault, make_sums, mean
from hpctrain.nn.losses.sums import PendingSums, Sums, Total


class BinaryCrossEntropy:
    """The cross-entropy of independent labels, a mean over the last axis: logits (n, ..., labels).

    Targets have the shape of the logits and values from 0 to 1, mostly 0 or 1; for one label they
    may be (n, ...). Each vector of labels counts as one target. `accuracy` is the share of labels
    for which logit > 0 agrees with target > 0.5.
    """

    terms = ("loss", "accuracy")
    task = "labels"
    metrics: ClassVar[Mapping[str, Metric]] = {"loss": mean("loss"), "accuracy": mean("accuracy")}

    def __call__(
        self, outputs: Array, targets: Array, scale: float | None = None
    ) -> tuple[Sums | PendingSums, Array | None]:
        """Return the sums, and the gradient of `scale` times the entropy; see Loss.

        Raises UsageError if the shapes do not fit.
        """
        if fault := find_shape_fault(targets, outputs.shape[1:], "binary_cross_entropy"):
            raise UsageError(fault)
        xp, labels = namespace(outputs), outputs.shape[-1]
        targets = targets.reshape(outputs.shape).astype(outputs.dtype, copy=False)
        decay = xp.exp(-abs(outputs))  # of numbers <= 0, which cannot overflow
        losses = xp.maximum(outputs, 0) - outputs * targets + xp.log1p(decay)
        correct = ((outputs > 0) == (targets > 0.5)).sum()
        totals = [losses.sum(dtype="float64") / labels, correct]
        sums = make_sums(totals, partial(_name_sums, outputs.size // labels, outputs.size))
        if scale is None:
            return sums, None
        sigmoid = xp.where(outputs >= 0, 1, decay) / (1 + decay)
        return sums, ((sigmoid - targets) * (scale / labels)).astype(outputs.dtype, copy=False)

    def find_fault(self, targets: Any, output_shape: Shape) -> str:
        """Return the fault of targets of another shape, or outside 0 .. 1; see Loss."""
        if fault := find_shape_fault(targets, output_shape, "binary_cross_entropy"):
            return fault
        is_invalid = ~((targets >= 0) & (targets <= 1)).reshape(len(targets), -1).all(axis=1)
        if not is_invalid.any():
            return ""
        i = int(np.argmax(is_invalid))
        value = targets[i][(targets[i] < 0) | (targets[i] > 1)].reshape(-1)[0]
        return f"binary_cross_entropy: expected targets from 0 to 1, seen {value} in sample {i}"

    def count_outputs(self, targets: Any) -> int:
        """Return the number of labels of a sample."""
        return 1 if targets.ndim == 1 else targets.shape[-1]

    def __repr__(self) -> str:
        return "binary_cross_entropy"


def _name_sums(count: int, elements: int, loss: float, correct: float) -> Sums:
    return {"loss": Total(loss, count), "accuracy": Total(correct, elements)}


binary_cross_entropy = BinaryCrossEntropy()
