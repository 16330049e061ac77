"""Metrics from counts of predictions: F1, the confusion matrix, top-k accuracy.

The predicted class has the largest logit, the first of equal ones; a label is predicted where its
logit is above 0. Counts are whole numbers: their sums have the same bits in any order.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.nn.metrics.metric import Observation, Summand, UndefinedError
from hpctrain.nn.metrics.scores import Scores, Task

MAX_CONFUSION = 256  #: classes; each row of metrics.jsonl has the square of their number


def bind_f1(task: Task, name: str) -> Summand:
    """Return F1, the harmonic mean of precision and recall.

    "f1" is of class 1 of two, "f1_macro" the mean over the classes or labels that occur among
    targets or predictions, "f1_micro" of all their counts together.
    """
    if name == "f1" and (task.has_labels or task.classes != 2):
        kind = "labels" if task.has_labels else "classes"
        raise UsageError(
            f"metrics: 'f1' is of class 1 of two classes, but the model has {task.classes} {kind}; "
            "take f1_macro or f1_micro"
        )
    size = 3 * task.classes  # correct, predicted and true of each class
    return Summand(name, size, partial(_count_classes, task.classes), partial(_f1, name))


def _count_classes(count: int, observation: Observation) -> np.ndarray:
    scores = _scores_of(observation)
    if scores.truth.ndim == 2:
        predicted, truth = scores.logits > 0, scores.truth == 1
        counts = [(predicted & truth).sum(axis=0), predicted.sum(axis=0), truth.sum(axis=0)]
        return np.concatenate(counts)
    truth, predicted = _pairs(scores)
    classes = truth[truth == predicted], predicted, truth
    return np.concatenate([np.bincount(x, minlength=count) for x in classes])


def _f1(name: str, counts: np.ndarray) -> float:
    correct, predicted, true = counts.reshape(3, -1)
    if name == "f1":
        correct, predicted, true = correct[1:], predicted[1:], true[1:]
    if name == "f1_micro":
        correct, predicted, true = (x.sum(keepdims=True) for x in (correct, predicted, true))
    occurs = predicted + true > 0
    if not occurs.any():
        subject = "class 1" if name == "f1" else "a class"
        raise UndefinedError(f"no target and no prediction is {subject}")
    return float(np.mean(2 * correct[occurs] / (predicted + true)[occurs]))


def bind_confusion(task: Task, name: str) -> Summand:
    """Return the confusion matrix: the targets of each true class by their predicted class."""
    if task.has_labels or task.classes > MAX_CONFUSION:
        kind = "labels" if task.has_labels else "classes"
        raise UsageError(
            f"metrics: 'confusion' is a matrix of at most {MAX_CONFUSION} classes, but the model "
            f"has {task.classes} {kind}; take f1_macro"
        )

    def count_pairs(observation: Observation) -> np.ndarray:
        truth, predicted = _pairs(_scores_of(observation))
        return np.bincount(truth * task.classes + predicted, minlength=task.classes**2)

    def as_matrix(counts: np.ndarray) -> list[list[int]]:
        matrix: list[list[int]] = counts.astype(np.int64).reshape(task.classes, -1).tolist()
        return matrix

    return Summand(name, task.classes**2, count_pairs, as_matrix)


def bind_top_k(task: Task, name: str) -> Summand:
    """Return the share of targets whose class is among the k with the largest logits.

    Of equal logits the class with the larger number comes first, as in scikit-learn.
    """
    k = int(name.removeprefix("top_"))
    if task.has_labels:
        raise UsageError(f"metrics: '{name}' is of one class of several, but the model has labels")
    if not 1 < k < task.classes:
        raise UsageError(
            f"metrics: '{name}' of {task.classes} classes: expected k >= 2, and more classes "
            f"than k; top_1 is the accuracy, top_{task.classes} is always 1"
        )

    def count_hits(observation: Observation) -> np.ndarray:
        scores = _scores_of(observation)
        counted = (scores.truth >= 0) & (scores.truth < task.classes)
        logits, truth = scores.logits[counted], scores.truth[counted][:, None]
        own = np.take_along_axis(logits, truth, axis=1)
        comes_later = np.arange(task.classes) > truth
        place = ((logits > own) | ((logits == own) & comes_later)).sum(axis=1)
        return np.array([np.count_nonzero(place < k), len(place)])

    def as_share(counts: np.ndarray) -> float:
        if not counts[1]:
            raise UndefinedError("the set has no targets")
        return float(counts[0] / counts[1])

    return Summand(name, 2, count_hits, as_share)


def _scores_of(observation: Observation) -> Scores:
    assert observation.scores is not None  # the metric was bound to a task
    return observation.scores


def _pairs(scores: Scores) -> tuple[np.ndarray, np.ndarray]:
    """Return the true and the predicted class of each target that counts."""
    counted = (scores.truth >= 0) & (scores.truth < scores.logits.shape[1])
    return scores.truth[counted], scores.logits.argmax(axis=1)[counted]
