"""The numbers by which a run is judged, and which of two values is the better one."""

from __future__ import annotations

from math import isfinite
from typing import Literal, get_args

Metric = Literal["test_loss", "test_accuracy", "train_loss", "train_accuracy"]
METRICS: tuple[Metric, ...] = get_args(Metric)


def goodness(metric: Metric, value: float) -> float:
    """Return a number that is larger where `value` is better: a loss falls, an accuracy rises."""
    return -value if metric.endswith("loss") else value


def better(metric: Metric, value: float, best: float | None, by: float = 0.0) -> bool:
    """Return whether `value` is better than `best`, None for none yet, by more than `by`."""
    if not isfinite(value):
        return False
    return best is None or goodness(metric, value) - goodness(metric, best) > by
