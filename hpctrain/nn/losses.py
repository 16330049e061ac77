"""Losses: how wrong the outputs are, as sums over samples, and which way is better."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hpctrain.errors import UsageError
from hpctrain.xp import Array, namespace


class Sums(NamedTuple):
    """Totals over samples, never means: those of shares can be added, whatever their sizes."""

    loss: float
    correct: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here


#: (outputs, labels, scale) -> (Sums, gradient of scale * Sums.loss); scale None asks no gradient.
Loss = Callable[[Array, Array, "float | None"], "tuple[Sums, Array | None]"]


def add(a: Sums, b: Sums) -> Sums:
    """Return the totals of both."""
    return Sums(a.loss + b.loss, a.correct + b.correct, a.count + b.count)


def cross_entropy(
    logits: Array, labels: Array, scale: float | None = None
) -> tuple[Sums, Array | None]:
    """Return the softmax cross-entropy of `logits` and the gradient of `scale` times it.

    `logits` is (n, classes), float32 or float64, not written; `labels` is (n,), integers in
    [0, classes), which whoever reads the data has checked. The gradient is a new array like
    `logits`. Raises UsageError if the shapes do not fit.
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise UsageError(
            f"cross_entropy: expected logits (n, classes) and labels (n,), "
            f"seen {logits.shape} and {labels.shape}"
        )
    xp = namespace(logits)
    rows = xp.arange(len(logits))
    correct = int((logits.argmax(axis=1) == labels).sum())
    # exp of numbers <= 0 cannot overflow, and the shift cancels in the softmax.
    shifted = logits - logits.max(axis=1, keepdims=True)
    powers = xp.exp(shifted)
    totals = powers.sum(axis=1)
    each = xp.log(totals) - shifted[rows, labels]
    sums = Sums(float(each.sum(dtype="float64")), correct, len(logits))
    if scale is None:
        return sums, None
    powers *= (scale / totals)[:, None]
    powers[rows, labels] -= scale
    return sums, powers
