"""Outputs and targets of a model as scores of classes, or of labels.

one class for each target    logits (n, ..., k), k > 1     labels (n, ...), 0 .. k - 1, or one-hot
two classes, one logit       logits (n, ..., 1) or (n,)    targets of that shape, 0 or 1
several labels               logits (n, ..., k), k > 1     targets of that shape, 0 or 1 each
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.nn.layer import Shape

IGNORED = -1  #: the class of a target that does not count


class Task(NamedTuple):
    """The task of a model: one of `classes` for each target, or several labels."""

    classes: int  #: or labels
    targets: int  #: per sample
    has_labels: bool = False  #: several, each 0 or 1
    has_one_logit: bool = False  #: of two classes


class Scores(NamedTuple):
    """Logits and true classes of some samples, a row for each target that may count."""

    logits: np.ndarray  #: (rows, classes)
    truth: np.ndarray  #: int64, classes (rows,) with IGNORED among them, or labels (rows, classes)
    faults: np.ndarray  #: float64 (2,): rows that are not finite, and targets neither 0 nor 1

    @classmethod
    def of(cls, task: Task, outputs: np.ndarray, targets: Any) -> Scores:
        """Return the scores of outputs (n, ...) and targets."""
        columns = 1 if task.has_one_logit else task.classes
        logits = outputs.reshape(-1, columns)
        if task.has_labels or task.has_one_logit:
            targets = targets.reshape(logits.shape)
            truth = (targets == 1).astype(np.int64)
            invalid_count = np.count_nonzero((targets != 0) & (targets != 1))
        else:
            if targets.shape == outputs.shape:
                targets = _classes_of(targets)
            truth = targets.reshape(-1).astype(np.int64)
            invalid_count = np.count_nonzero((truth < IGNORED) | (truth >= task.classes))
        if task.has_one_logit:
            truth = truth.reshape(-1)
            logits = np.concatenate([np.zeros_like(logits), logits], axis=1)
        infinite_count = np.count_nonzero(~np.isfinite(logits).all(axis=1))
        return cls(logits, truth, np.array([infinite_count, invalid_count], np.float64))


def find_task(loss: Any, output_shape: Shape, targets: Any) -> Task | None:
    """Return the task of a model, None for real numbers; `targets` are of a few samples.

    A loss may have an attribute `task`: "classes", "labels", or "numbers". Of others the shapes
    and the values of the targets tell.
    """
    task = getattr(loss, "task", None) or _infer_task(output_shape, targets)
    if task == "classes":
        if targets.shape[1:] == output_shape and (_classes_of(targets) == output_shape[-1]).any():
            return None
        return Task(output_shape[-1], prod(output_shape[:-1]))
    if task == "labels" and output_shape[-1:] in ((), (1,)):
        return Task(2, prod(output_shape), has_one_logit=True)
    if task == "labels":
        return Task(output_shape[-1], prod(output_shape[:-1]), has_labels=True)
    return None


def _classes_of(one_hot: np.ndarray) -> np.ndarray:
    """Return the class of each target (..., k); k, which is none, where it is not one-hot."""
    k = one_hot.shape[-1]
    is_valid = ((one_hot == 1).sum(axis=-1) == 1) & ((one_hot == 0).sum(axis=-1) == k - 1)
    return np.where(is_valid, one_hot.argmax(axis=-1), k)


def _infer_task(output_shape: Shape, targets: Any) -> str:
    if isinstance(targets, dict | tuple):
        return "numbers"
    shape, has_integers = targets.shape[1:], targets.dtype.kind in "iub"
    if has_integers and output_shape[-1:] > (1,) and shape == output_shape[:-1]:
        return "classes"
    is_alike = shape == output_shape or (output_shape[-1:] == (1,) and shape == output_shape[:-1])
    return "labels" if is_alike and np.isin(targets, (0, 1)).all() else "numbers"


def require_task(task: Task | None, name: str, loss: Any) -> Task:
    """Return `task`; raise UsageError for metric `name` of real numbers."""
    if task is None:
        raise UsageError(
            f"metrics: '{name}' is of classes or labels, but the targets of the loss {loss!r} are "
            "real numbers; remove it, or train with 'cross_entropy' or 'binary_cross_entropy'"
        )
    return task
