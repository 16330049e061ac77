"""Losses: sums over samples of the error of outputs, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, fetch, namespace, on_device, to_host
from hpctrain.nn.cuda.cross_entropy import entropies


class Sums(NamedTuple):
    """Totals over targets, never means: those of shares can be added, whatever their sizes.

    A sample has one target, its label, or several: a text has one at each place.
    """

    loss: float
    correct: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used


class PendingSums(NamedTuple):
    """Sums computed on a device, with an asynchronous copy to the host under way."""

    numbers: Callable[[], np.ndarray]  #: waits for loss, right answers, wrong labels; float64
    count: int  # type: ignore[assignment]
    refuse: Callable[[], None]  #: raises UsageError for wrong labels

    def sums(self) -> Sums:
        """Wait for the sums and return them; raise UsageError for invalid labels."""
        loss, correct, wrong = self.numbers().tolist()
        if wrong:
            self.refuse()
        return Sums(loss, int(correct), self.count)


#: (outputs, labels, scale) -> (Sums, gradient of scale * Sums.loss); scale None: no gradient.
Loss = Callable[[Array, Array, "float | None"], "tuple[Sums | PendingSums, Array | None]"]


def add(a: Sums, b: Sums) -> Sums:
    """Return the totals of both."""
    return Sums(a.loss + b.loss, a.correct + b.correct, a.count + b.count)


def arrived(sums: Sums | PendingSums) -> Sums:
    """Return `sums` on the host; those of a device are waited for, and nothing else."""
    return sums.sums() if isinstance(sums, PendingSums) else sums


def cross_entropy(
    logits: Array, labels: Array, scale: float | None = None
) -> tuple[Sums | PendingSums, Array | None]:
    """Return the softmax cross-entropy of `logits` and the gradient of `scale` times it.

    `logits` is (n, ..., classes), float32 or float64, not written; `labels` is (n, ...), integers
    in [0, classes); each of them counts as one target. The gradient is a new array like `logits`.
    Raises UsageError if shapes or labels do not fit.
    """
    if logits.ndim < 2 or labels.shape != logits.shape[:-1]:
        raise UsageError(
            f"cross_entropy: expected logits (n, ..., classes) and labels (n, ...), "
            f"seen {logits.shape} and {labels.shape}"
        )
    shape = logits.shape
    logits, labels = logits.reshape(labels.size, shape[-1]), labels.reshape(-1)
    refuse = partial(_refuse, labels, shape[-1])
    if on_device(logits):
        numbers, gradient = entropies(logits, labels, scale)
        sums = PendingSums(fetch(numbers), len(logits), refuse)
        return sums, gradient if gradient is None else gradient.reshape(shape)
    # Labels below 0 would index from the end, and train a wrong class.
    if ((labels < 0) | (labels >= shape[-1])).any():
        refuse()
    rows = np.arange(len(logits))
    correct = (logits.argmax(axis=1) == labels).sum()
    # exp of numbers <= 0 cannot overflow, and the shift cancels in the softmax.
    powers = logits - logits.max(axis=1, keepdims=True)
    own = powers[rows, labels]
    np.exp(powers, out=powers)
    totals = powers.sum(axis=1)
    losses = np.log(totals) - own
    loss = Sums(float(losses.sum(dtype="float64")), int(correct), len(logits))
    if scale is None:
        return loss, None
    powers *= (scale / totals)[:, None]
    powers[rows, labels] -= scale
    return loss, powers.reshape(shape)


def mean_squared_error(
    outputs: Array, target: Array, scale: float | None = None
) -> tuple[Sums | PendingSums, Array | None]:
    """Return the squared error, a mean over the last axis, and the gradient of `scale` times it.

    Both are (n, ..., features), or `target` is (n, ...) for one feature; a target is one vector of
    features, and none is `correct`. Raises UsageError if the shapes do not fit.
    """
    features = outputs.shape[-1]
    single = features == 1 and target.shape == outputs.shape[:-1]
    if outputs.ndim < 2 or not (single or target.shape == outputs.shape):
        raise UsageError(
            f"mean_squared_error: expected {outputs.shape} as the outputs have, seen {target.shape}"
        )
    error = outputs - target.reshape(outputs.shape)
    total = (error * error).sum(dtype="float64") / features
    sums = _sums_of(total, outputs.size // features)
    if scale is None:
        return sums, None
    error *= 2 * scale / features
    return sums, error


def _sums_of(loss: Array, count: int) -> Sums | PendingSums:
    """Return the Sums of a loss, of shape (), without right or wrong targets."""
    if not on_device(loss):
        return Sums(float(loss), 0, count)
    xp = namespace(loss)
    numbers = xp.zeros(3, np.float64)
    numbers[0] = loss
    return PendingSums(fetch(numbers), count, lambda: None)


def _refuse(labels: Array, classes: int) -> None:
    """Raise UsageError that names an invalid label."""
    labels = to_host(labels)
    wrong = labels[(labels < 0) | (labels >= classes)]
    raise UsageError(
        f"label {wrong[0]} is out of range; expected labels in 0 .. {classes - 1}, "
        f"since the model has {classes} outputs"
    )
