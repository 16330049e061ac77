"""The metrics of a run, and the comparison of two values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import Literal, NamedTuple

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.names import unknown

Direction = Literal["min", "max"]
#: The direction in which each built-in metric improves.
DIRECTIONS: dict[str, Direction] = {
    "loss": "min", "accuracy": "max", "rmse": "min", "r2": "max",
    "auc": "max", "f1": "max", "f1_macro": "max", "f1_micro": "max",
}  # fmt: skip
TOP_K = "top_[1-9][0-9]{0,3}"  #: of the names of top-k accuracies, which rise
PARTS = ("test", "train")


class Criterion(NamedTuple):
    """A metric, and the direction in which it improves."""

    metric: str
    direction: Direction

    def goodness(self, value: float) -> float:
        """Return a number that is larger where `value` is better."""
        return value if self.direction == "max" else -value

    def better(self, value: float, best: float | None, min_delta: float = 0.0) -> bool:
        """Return whether `value` is better than `best` by more than `min_delta`.

        `best` is None for no value yet.
        """
        if not isfinite(value):
            return False
        return best is None or self.goodness(value) - self.goodness(best) > min_delta


def make_criterion(metric: str, direction: Direction | None, place: str) -> Criterion:
    """Return the criterion of `metric`, such as "test_loss", with its usual direction if None.

    A metric of a user's own loss has no usual direction. Raises UsageError, which begins with
    `place`, for a metric that is unknown, or without a direction.
    """
    part, _, name = metric.partition("_")
    usual = "max" if re.fullmatch(TOP_K, name) else DIRECTIONS.get(name)
    if part in PARTS and name and (chosen := direction or usual):
        return Criterion(metric, chosen)
    metric_names = [f"{part}_{name}" for name in DIRECTIONS for part in PARTS]
    hint = "; one of a loss of your own needs a direction beside it" if part in PARTS else ""
    raise UsageError(f"{place}: {unknown('metric', metric, metric_names)}{hint}")


def idle(ranks: Mapping[str, np.ndarray]) -> list[float] | None:
    """Return the share of time that each rank's main thread waited; None on a single rank."""
    wait_shares = ranks["wait_s"] / np.maximum(ranks["wall_s"], 1e-9)
    return wait_shares.round(4).tolist() if wait_shares.size > 1 else None
