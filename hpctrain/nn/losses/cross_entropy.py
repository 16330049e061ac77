"""The softmax cross-entropy, for samples with a single class."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.labels import find_invalid_label
from hpctrain.core.xp import Array, fetch, on_device, to_host
from hpctrain.nn.cuda.cross_entropy import fused_cross_entropy
from hpctrain.nn.layer import Shape
from hpctrain.nn.losses.loss import Metric, mean
from hpctrain.nn.losses.sums import PendingSums, Sums, Total


class CrossEntropy:
    """The softmax cross-entropy of logits (n, ..., classes) and labels (n, ...).

    Labels are integers in 0 .. classes - 1; each counts as one target. `accuracy` is the share of
    labels with the largest logit.
    """

    terms = ("loss", "accuracy")
    metrics: ClassVar[Mapping[str, Metric]] = {"loss": mean("loss"), "accuracy": mean("accuracy")}

    def __call__(
        self, outputs: Array, targets: Array, scale: float | None = None
    ) -> tuple[Sums | PendingSums, Array | None]:
        """Return the sums, and the gradient of `scale` times the entropy; see Loss.

        Raises UsageError if shapes or labels do not fit.
        """
        if outputs.ndim < 2 or targets.shape != outputs.shape[:-1]:
            raise UsageError(
                f"cross_entropy: expected logits (n, ..., classes) and labels (n, ...), "
                f"seen {outputs.shape} and {targets.shape}"
            )
        logits = outputs.reshape(targets.size, outputs.shape[-1])
        sums, gradient = _sum_over_rows(logits, targets.reshape(-1), scale)
        return sums, gradient if gradient is None else gradient.reshape(outputs.shape)

    def find_fault(self, targets: Any, output_shape: Shape) -> str:
        """Return the fault of labels of another dtype, shape or range; see Loss."""
        if isinstance(targets, dict | tuple):
            return f"cross_entropy: expected one array of labels, seen a {type(targets).__name__}"
        if targets.dtype.kind not in "iu":
            return (
                f"cross_entropy: expected integer class labels, seen {targets.dtype}; convert them "
                'with y.astype("int64"), or take the loss "mean_squared_error" for real numbers, '
                '"binary_cross_entropy" for several labels per sample'
            )
        if targets.shape[1:] != output_shape[:-1]:
            expected_shape = (len(targets), *output_shape[:-1])
            remedy = "; use y[:, 0]" if targets.shape == (*expected_shape, 1) else ""
            return (
                f"cross_entropy: expected labels of shape {expected_shape}, one for each of the "
                f"model's output vectors, seen {targets.shape}{remedy}"
            )
        fault = find_invalid_label(targets, output_shape[-1])
        is_short = fault and targets.max() >= output_shape[-1]
        return f"{fault}, or give the model {targets.max() + 1} outputs" if is_short else fault

    def count_outputs(self, targets: Any) -> int:
        """Return the number of classes: one more than the largest label."""
        return int(targets.max()) + 1

    def __repr__(self) -> str:
        return "cross_entropy"


def _sum_over_rows(
    logits: Array, labels: Array, scale: float | None
) -> tuple[Sums | PendingSums, Array | None]:
    """Return the sums over the rows of `logits` (n, classes), and the gradient (n, classes)."""
    n, classes = logits.shape
    if on_device(logits):
        device_sums, device_gradient = fused_cross_entropy(logits, labels, scale)
        return PendingSums(
            fetch(device_sums), partial(_name_sums, labels, classes)
        ), device_gradient
    # NumPy would index with a negative label from the end, and so train a wrong class.
    if ((labels < 0) | (labels >= classes)).any():
        _raise_invalid_label(labels, classes)
    rows = np.arange(n)
    correct = (logits.argmax(axis=1) == labels).sum()
    # exp of numbers <= 0 cannot overflow, and the shift cancels in the softmax.
    shifted_logits = logits - logits.max(axis=1, keepdims=True)
    label_logits = shifted_logits[rows, labels]
    exponentials = np.exp(shifted_logits, out=shifted_logits)
    totals = exponentials.sum(axis=1)
    losses = np.log(totals) - label_logits
    sums = _name_sums(labels, classes, float(losses.sum(dtype="float64")), int(correct), 0)
    if scale is None:
        return sums, None
    gradient = exponentials
    gradient *= (scale / totals)[:, None]
    gradient[rows, labels] -= scale
    return sums, gradient


def _name_sums(
    labels: Array, classes: int, loss: float, correct: float, invalid_count: float
) -> Sums:
    """Return the sums over `labels`; raise UsageError if some are invalid."""
    if invalid_count:
        _raise_invalid_label(labels, classes)
    return {"loss": Total(loss, len(labels)), "accuracy": Total(correct, len(labels))}


def _raise_invalid_label(labels: Array, classes: int) -> None:
    """Raise UsageError that names an invalid label."""
    labels = to_host(labels)
    invalid_labels = labels[(labels < 0) | (labels >= classes)]
    raise UsageError(
        f"label {invalid_labels[0]} is out of range; expected labels in 0 .. {classes - 1}, "
        f"since the model has {classes} outputs"
    )


cross_entropy = CrossEntropy()
