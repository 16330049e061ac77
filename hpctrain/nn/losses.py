"""Losses: the sum of the error over samples, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, fetch, namespace, on_device, to_host
from hpctrain.nn.cuda.cross_entropy import fused_cross_entropy


class Sums(NamedTuple):
    """Totals over targets, not means: totals of shares can be added, whatever their sizes.

    A sample has one target, its label, or several: a text has one at each position.
    """

    loss: float
    correct: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used


class PendingSums(NamedTuple):
    """Sums computed on a device, with an asynchronous copy to the host under way."""

    #: Waits for [loss, correct predictions, invalid labels], float64
    fetch_numbers: Callable[[], np.ndarray]
    count: int  # type: ignore[assignment]
    raise_invalid_label: Callable[[], None]  #: raises UsageError that names an invalid label

    def wait(self) -> Sums:
        """Wait for the sums and return them; raise UsageError for invalid labels."""
        loss, correct, invalid_count = self.fetch_numbers().tolist()
        if invalid_count:
            self.raise_invalid_label()
        return Sums(loss, int(correct), self.count)


#: (outputs, labels, scale) -> (Sums, gradient of scale * Sums.loss); no gradient if scale is None.
Loss = Callable[[Array, Array, "float | None"], "tuple[Sums | PendingSums, Array | None]"]


def add(a: Sums, b: Sums) -> Sums:
    """Return the totals of `a` and `b` together."""
    return Sums(a.loss + b.loss, a.correct + b.correct, a.count + b.count)


def wait_for_sums(sums: Sums | PendingSums) -> Sums:
    """Return `sums` on the host; wait only for the sums, not for other work of the device."""
    return sums.wait() if isinstance(sums, PendingSums) else sums


def cross_entropy(
    logits: Array, labels: Array, scale: float | None = None
) -> tuple[Sums | PendingSums, Array | None]:
    """Return the softmax cross-entropy of `logits` and the gradient of `scale` times it.

    `logits` is (n, ..., classes), float32 or float64, and is not written. `labels` is (n, ...),
    integers in [0, classes); each label counts as one target. The gradient is a new array like
    `logits`. Raises UsageError if shapes or labels do not fit.
    """
    if logits.ndim < 2 or labels.shape != logits.shape[:-1]:
        raise UsageError(
            f"cross_entropy: expected logits (n, ..., classes) and labels (n, ...), "
            f"seen {logits.shape} and {labels.shape}"
        )
    shape = logits.shape
    logits, labels = logits.reshape(labels.size, shape[-1]), labels.reshape(-1)
    raise_invalid_label = partial(_raise_invalid_label, labels, shape[-1])
    if on_device(logits):
        device_sums, gradient = fused_cross_entropy(logits, labels, scale)
        pending_sums = PendingSums(fetch(device_sums), len(logits), raise_invalid_label)
        return pending_sums, gradient if gradient is None else gradient.reshape(shape)
    # NumPy would index with a negative label from the end, and so train a wrong class.
    if ((labels < 0) | (labels >= shape[-1])).any():
        raise_invalid_label()
    rows = np.arange(len(logits))
    correct = (logits.argmax(axis=1) == labels).sum()
    # exp of numbers <= 0 cannot overflow, and the shift cancels in the softmax.
    shifted_logits = logits - logits.max(axis=1, keepdims=True)
    label_logits = shifted_logits[rows, labels]
    exponentials = np.exp(shifted_logits, out=shifted_logits)
    totals = exponentials.sum(axis=1)
    losses = np.log(totals) - label_logits
    sums = Sums(float(losses.sum(dtype="float64")), int(correct), len(logits))
    if scale is None:
        return sums, None
    gradient = exponentials
    gradient *= (scale / totals)[:, None]
    gradient[rows, labels] -= scale
    return sums, gradient.reshape(shape)


def mean_squared_error(
    outputs: Array, target: Array, scale: float | None = None
) -> tuple[Sums | PendingSums, Array | None]:
    """Return the squared error, a mean over the last axis, and the gradient of `scale` times it.

    Outputs and target are (n, ..., features); for one feature the target may be (n, ...). Each
    vector of features counts as one target, and `correct` is always 0. Raises UsageError if the
    shapes do not fit.
    """
    features = outputs.shape[-1]
    is_single_feature = features == 1 and target.shape == outputs.shape[:-1]
    if outputs.ndim < 2 or not (is_single_feature or target.shape == outputs.shape):
        raise UsageError(
            f"mean_squared_error: expected a target of shape {outputs.shape}, as the outputs have, "
            f"seen {target.shape}"
        )
    error = outputs - target.reshape(outputs.shape)
    total = (error * error).sum(dtype="float64") / features
    sums = _make_sums(total, outputs.size // features)
    if scale is None:
        return sums, None
    error *= 2 * scale / features
    return sums, error


def _make_sums(loss: Array, count: int) -> Sums | PendingSums:
    """Return the Sums of a `loss` of shape (), with 0 correct predictions."""
    if not on_device(loss):
        return Sums(float(loss), 0, count)
    xp = namespace(loss)
    device_sums = xp.zeros(3, np.float64)
    device_sums[0] = loss
    return PendingSums(fetch(device_sums), count, lambda: None)


def _raise_invalid_label(labels: Array, classes: int) -> None:
    """Raise UsageError that names an invalid label."""
    labels = to_host(labels)
    invalid_labels = labels[(labels < 0) | (labels >= classes)]
    raise UsageError(
        f"label {invalid_labels[0]} is out of range; expected labels in 0 .. {classes - 1}, "
        f"since the model has {classes} outputs"
    )
