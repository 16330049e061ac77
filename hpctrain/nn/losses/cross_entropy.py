"""The softmax cross-entropy, for samples with a single class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.labels import find_invalid_label
from hpctrain.core.xp import Array, fetch, on_device, to_host
from hpctrain.nn.cuda.cross_entropy import fused_cross_entropy
from hpctrain.nn.layer import Key, Shape
from hpctrain.nn.losses.loss import Metric, mean
from hpctrain.nn.losses.sums import PendingSums, Sums, Total


@dataclass(frozen=True)
class CrossEntropy:
    """The softmax cross-entropy of logits (n, ..., classes) and labels (n, ...).

    Labels are integers in 0 .. classes - 1; each counts as one target, or by the weight of its
    class. The loss of a step is then divided by the weights of all its targets, as PyTorch does:
    sum of w[y] l(y) / sum of w[y]. `accuracy` is the share of labels with the largest logit,
    without weights. Raises UsageError for weights that are negative, not finite, or all 0.
    """

    class_weights: Sequence[float] | None = None  #: (classes,); None: each target counts as one

    terms = ("loss", "accuracy")
    task = "classes"
    metrics: ClassVar[Mapping[str, Metric]] = {"loss": mean("loss"), "accuracy": mean("accuracy")}

    def __post_init__(self) -> None:
        """Check the weights."""
        if self.class_weights is not None:
            weights = as_class_weights(self.class_weights, "class_weights")
            object.__setattr__(self, "class_weights", weights)

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
        weights = None if self.class_weights is None else np.array(self.class_weights)
        if weights is not None and len(weights) != logits.shape[1]:
            raise UsageError(_weights_fault(len(weights), logits.shape[1]))
        sums, gradient = _sum_over_rows(logits, targets.reshape(-1), scale, weights)
        return sums, gradient if gradient is None else gradient.reshape(outputs.shape)

    def mean_factor(self, batch: Any, key: Key) -> float:
        """Return the number of targets of a step, divided by their weights; collective.

        Of the ranks of `key.sum_over_ranks`, else of the targets of `batch`. The weights are added
        from the number of targets of each class: the same bits on any number of ranks. 1 without
        weights: then nothing is summed, on any rank.
        """
        if self.class_weights is None:
            return 1.0
        if key.mean_factor is not None:
            return key.mean_factor
        counts = count_classes(to_host(batch.targets), len(self.class_weights)).astype(np.float64)
        if key.sum_over_ranks is not None:
            counts = key.sum_over_ranks(counts)
        total = float(counts @ np.array(self.class_weights))
        return float(counts.sum()) / total if total else 0.0

    def find_fault(self, targets: Any, output_shape: Shape) -> str:
        """Return the fault of labels of another dtype, shape or range; see Loss."""
        if self.class_weights is not None and len(self.class_weights) != output_shape[-1]:
            return _weights_fault(len(self.class_weights), output_shape[-1])
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
        weights = self.class_weights
        return "cross_entropy" if weights is None else f"cross_entropy with weights {weights}"


def as_class_weights(weights: Any, place: str) -> tuple[float, ...]:
    """Return the weights of classes; raise UsageError, which begins with `place`, for others."""
    try:
        array = np.asarray(weights)
    except ValueError:  # lists of several lengths
        array = np.zeros(0)
    is_valid = array.ndim == 1 and array.dtype.kind in "fiu" and np.isfinite(array).all()
    if not is_valid or (array < 0).any() or not (array > 0).any():
        remedy = "; write balanced_class_weights(counts)" * isinstance(weights, str)
        raise UsageError(
            f"{place}: expected a number of 0 or more for each class, not all 0, seen {weights!r}"
            f"{remedy}"
        )
    return tuple(map(float, array))


def balanced_class_weights(counts: Any) -> tuple[float, ...]:
    """Return n / (classes * count) for each class, from the number of its targets (classes,).

    So each class has the same weight in all, and a target the weight 1 in the mean. For labels `y`:
    `ht.nn.balanced_class_weights(np.bincount(y))`. Raises UsageError for a class without targets.
    """
    counts = np.asarray(counts, np.float64)
    if not counts.all():
        raise UsageError(
            f"balanced class weights: class {int(np.argmin(counts))} has no training sample: its "
            "weight is not defined; give a list of weights, or remove the class"
        )
    return tuple((counts.sum() / (len(counts) * counts)).tolist())


def count_classes(labels: np.ndarray, classes: int) -> np.ndarray:
    """Return the number of targets of each class, int64; raise UsageError for an invalid label."""
    labels = labels.reshape(-1)
    if labels.size and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        _raise_invalid_label(labels, classes)
    return np.bincount(labels.astype(np.int64), minlength=classes)


def _weights_fault(weights: int, classes: int) -> str:
    return (
        f"cross_entropy: expected {classes} class_weights, one for each of the model's outputs, "
        f"seen {weights}"
    )


def _sum_over_rows(
    logits: Array, labels: Array, scale: float | None, weights: np.ndarray | None
) -> tuple[Sums | PendingSums, Array | None]:
    """Return the sums over the rows of `logits` (n, classes), and the gradient (n, classes)."""
    n, classes = logits.shape
    if on_device(logits):
        device_sums, device_gradient = fused_cross_entropy(logits, labels, scale, weights)
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
    own_weights = None if weights is None else weights[labels]
    weight = n if own_weights is None else float(own_weights.sum())
    losses = losses if own_weights is None else losses * own_weights
    sums = _name_sums(labels, classes, float(losses.sum(dtype="float64")), int(correct), 0, weight)
    if scale is None:
        return sums, None
    gradient = exponentials
    scales = scale if own_weights is None else (scale * own_weights).astype(logits.dtype)
    gradient *= (scales / totals)[:, None]
    gradient[rows, labels] -= scales
    return sums, gradient


def _name_sums(
    labels: Array,
    classes: int,
    loss: float,
    correct: float,
    invalid_count: float,
    weight: float | None = None,
) -> Sums:
    """Return the sums over `labels`, of the weight `weight`; raise UsageError for invalid ones."""
    if invalid_count:
        _raise_invalid_label(labels, classes)
    n = len(labels)
    return {"loss": Total(loss, n if weight is None else weight), "accuracy": Total(correct, n)}


def _raise_invalid_label(labels: Array, classes: int) -> None:
    """Raise UsageError that names an invalid label."""
    labels = to_host(labels)
    invalid_labels = labels[(labels < 0) | (labels >= classes)]
    raise UsageError(
        f"label {invalid_labels[0]} is out of range; expected labels in 0 .. {classes - 1}, "
        f"since the model has {classes} outputs"
    )


cross_entropy = CrossEntropy()
