"""The area under the ROC curve, from the ranks of all scores: no histogram, no threshold.

With p positive and n negative targets it is the share of the p n pairs whose positive has the
larger score, pairs of equal scores counted half (Hanley and McNeil, 1982). Twice the number of
pairs is a whole number, so the value has the same bits whoever holds which score:

    AUC = sum over positives of (negatives below + negatives not above) / 2 p n
"""

from __future__ import annotations

import numpy as np

from hpctrain.nn.metrics.metric import UndefinedError
from hpctrain.nn.metrics.scores import Scores


def columns_of(scores: Scores) -> np.ndarray:
    """Return the scores whose order matters, float64 (rows, columns).

    Of two classes the log odds of class 1, of more the log odds of each class against the rest, of
    labels their logits: they order samples as probabilities do, and none is rounded to 0 or 1.
    """
    z = scores.logits.astype(np.float64)
    if scores.truth.ndim == 2:
        return z
    if z.shape[1] == 2:
        return z[:, 1:] - z[:, :1]
    return _log_odds(z)


def _log_odds(z: np.ndarray) -> np.ndarray:
    """Return log(p / (1 - p)) of the softmax p of each class, (rows, classes)."""
    rows, largest = np.arange(len(z)), z.argmax(axis=1)
    shifted = z - z[rows, largest][:, None]
    exponentials = np.exp(shifted)
    # The largest class is in the rest of each other one: no difference of nearly equal numbers.
    rest = exponentials.sum(axis=1, keepdims=True) - exponentials
    others = shifted.copy()
    others[rows, largest] = -np.inf
    second = others.max(axis=1)
    with np.errstate(divide="ignore"):
        odds = shifted - np.log(rest)
    odds[rows, largest] = -second - np.log(np.exp(others - second[:, None]).sum(axis=1))
    return odds


def positives(truth: np.ndarray, column: int, columns: int) -> np.ndarray:
    """Return a mask of the true classes or labels (rows, ...) that are positive in `column`."""
    if truth.ndim == 2:
        return truth[:, column] == 1
    return truth == (1 if columns == 1 else column)


def area(scores: np.ndarray, is_positive: np.ndarray) -> float | None:
    """Return the AUC of `scores` (n,); None if all are positive, or none is."""
    positive, negative = scores[is_positive], np.sort(scores[~is_positive])
    if not positive.size or not negative.size:
        return None
    below = np.searchsorted(negative, positive, "left").sum(dtype=np.int64)
    not_above = np.searchsorted(negative, positive, "right").sum(dtype=np.int64)
    return (int(below) + int(not_above)) / (2 * positive.size * negative.size)


def mean_area(areas: np.ndarray, has_labels: bool) -> float:
    """Return the mean of the areas of all columns; NaN stands for one that is not defined."""
    missing = np.flatnonzero(np.isnan(areas))
    if missing.size and len(areas) == 1:
        raise UndefinedError("the set has targets of a single class")
    if missing.size:
        noun = "label" if has_labels else "class"
        raise UndefinedError(f"{noun} {missing[0]} has only positive or only negative targets")
    return float(np.mean(areas))
