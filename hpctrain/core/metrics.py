"""The metrics of a run, and the comparison of two values."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Literal, get_args

import numpy as np

Metric = Literal["test_loss", "test_accuracy", "train_loss", "train_accuracy"]
METRICS: tuple[Metric, ...] = get_args(Metric)


def goodness(metric: Metric, value: float) -> float:
    """Return a number that is larger where `value` is better: a loss falls, an accuracy rises."""
    return -value if metric.endswith("loss") else value


def better(metric: Metric, value: float, best: float | None, min_delta: float = 0.0) -> bool:
    """Return whether `value` is better than `best`, None for none yet, by more than `min_delta`."""
    if not isfinite(value):
        return False
    return best is None or goodness(metric, value) - goodness(metric, best) > min_delta


def means(name: str, loss: float, correct: float, count: float) -> dict[str, float | None]:
    """Return loss and accuracy of a set `name` from sums over its targets; None over none."""
    sums = {f"{name}_loss": loss, f"{name}_accuracy": correct}
    return {key: total / count if count else None for key, total in sums.items()}


def idle(ranks: Mapping[str, np.ndarray]) -> list[float] | None:
    """Return the fraction of each rank's time that its main thread waited; None for one rank."""
    waited = ranks["wait_s"] / np.maximum(ranks["wall_s"], 1e-9)
    return waited.round(4).tolist() if waited.size > 1 else None
