"""Metrics by name or of the user's own, bound to the task of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.metrics import DIRECTIONS, TOP_K
from hpctrain.core.names import unknown
from hpctrain.nn.metrics.counts import bind_confusion, bind_f1, bind_top_k
from hpctrain.nn.metrics.metric import Metric, Observation, Summand, Value, bind_own
from hpctrain.nn.metrics.scores import Scores, Task, find_task, require_task

AUC = "auc"
COUNTS: dict[str, Callable[[Task, str], Summand]] = {
    "f1": bind_f1,
    "f1_macro": bind_f1,
    "f1_micro": bind_f1,
    "confusion": bind_confusion,
}
NAMES = (AUC, *COUNTS, "top_5")  #: top_k for any k


def is_name(metric: Any) -> bool:
    """Return whether `metric` is the name of a metric that is computed from outputs."""
    name = metric.replace("-", "_") if isinstance(metric, str) else ""
    return name in NAMES or re.fullmatch(TOP_K, name) is not None


def check_metrics(metrics: Iterable[str | Metric], place: str = "metrics") -> list[str | Metric]:
    """Return `metrics` without repetitions; "top-5" and "top_5" are one name.

    Raises UsageError, which begins with `place`, for an unknown name.
    """
    if isinstance(metrics, str) or not isinstance(metrics, Iterable):
        raise UsageError(f'{place}: expected a list, such as ["auc", "f1"], seen {metrics!r}')
    checked: dict[str, str | Metric] = {}
    for metric in metrics:
        if isinstance(metric, Metric):
            if checked.get(metric.name, metric) is not metric or metric.name in NAMES:
                raise UsageError(f"{place}: expected one metric of the name '{metric.name}'")
            checked[metric.name] = metric
            continue
        if str(metric) in DIRECTIONS and not is_name(metric):
            raise UsageError(
                f"{place}: '{metric}' is a metric of a loss, and always there with it, as "
                f"test_{metric}; leave it out"
            )
        if not is_name(metric):
            raise UsageError(f"{place}: {unknown('metric', metric, NAMES)}")
        name = metric.replace("-", "_")
        checked[name] = name
    return list(checked.values())


@dataclass(frozen=True)
class BoundMetrics:
    """Metrics of a set of samples, for the outputs of one model."""

    names: Sequence[str] = ()  #: in the order of the user
    summands: Sequence[Summand] = ()
    task: Task | None = None  #: of the model; None if no metric needs it

    @property
    def has_auc(self) -> bool:
        """Whether scores are kept."""
        return AUC in self.names

    @property
    def scalars(self) -> list[str]:
        """The names of metrics that are numbers."""
        return [name for name in self.names if name != "confusion"]

    @cached_property
    def _exact(self) -> list[Summand]:
        return [x for x in self.summands if x.is_exact]

    @cached_property
    def _rounded(self) -> list[Summand]:
        return [x for x in self.summands if not x.is_exact]

    @property
    def count_size(self) -> int:
        """The length of the vector of whole numbers, the two numbers of faults first."""
        return 2 + sum(x.size for x in self._exact)

    @property
    def sum_size(self) -> int:
        """The length of the vector of sums that depend on their order."""
        return sum(x.size for x in self._rounded)

    def observe(self, outputs: np.ndarray, targets: Any) -> Observation:
        """Return outputs (n, ...) and targets with their scores, if a metric needs these."""
        scores = None if self.task is None else Scores.of(self.task, outputs, targets)
        return Observation(outputs, targets, scores)

    def counts(self, observation: Observation) -> np.ndarray:
        """Return the whole numbers of some samples, float64 (count_size,)."""
        faults = np.zeros(2) if observation.scores is None else observation.scores.faults
        return np.concatenate([faults, *(x.measure(observation) for x in self._exact)])

    def sums(self, observation: Observation) -> np.ndarray:
        """Return the other sums of some samples, float64 (sum_size,)."""
        return np.concatenate([np.zeros(0), *(x.measure(observation) for x in self._rounded)])

    def finish(
        self, counts: np.ndarray, sums: np.ndarray, auc: Callable[[], float]
    ) -> tuple[dict[str, Value], dict[str, str]]:
        """Return the values by name, and the reasons of those that are not defined, and None."""
        calls: dict[str, Callable[[], Value]] = {AUC: auc}
        for summands, vector in ((self._exact, counts[2:]), (self._rounded, sums)):
            ends = accumulate((x.size for x in summands), initial=0)
            for summand, (start, stop) in zip(summands, pairwise(ends), strict=True):
                calls[summand.name] = partial(summand.finish, vector[start:stop])
        own_names = {x.name for x in self._rounded}
        fault = _fault_text(counts[:2])
        values: dict[str, Value] = {}
        reasons: dict[str, str] = {}
        for name in self.names:
            values[name] = None
            if fault and name not in own_names:
                reasons[name] = fault
                continue
            try:
                value = calls[name]()
            except ArithmeticError as error:
                reasons[name] = str(error)
                continue
            if isinstance(value, float) and not np.isfinite(value):
                reasons[name] = f"its value is {value}"
            else:
                values[name] = value
        return values, reasons


def _fault_text(faults: np.ndarray) -> str:
    infinite_count, invalid_count = faults.astype(int).tolist()
    if infinite_count:
        return f"the outputs of {infinite_count} targets are not finite"
    return f"{invalid_count} targets are no class of the model" if invalid_count else ""


def bind(
    metrics: Sequence[str | Metric], loss: Any, outputs: np.ndarray, targets: Any
) -> BoundMetrics:
    """Return `metrics` for a model, of which `outputs` (n, ...) and `targets` are a few samples'.

    Raises UsageError for a metric that does not fit.
    """
    names = [x.name if isinstance(x, Metric) else x for x in metrics]
    if taken := sorted({*names} & {*loss.metrics}):
        raise UsageError(f"metrics: '{taken[0]}' is a metric of the loss {loss!r} already")
    task, summands = None, []
    for metric in metrics:
        if isinstance(metric, Metric):
            summands.append(bind_own(metric, outputs, targets))
            continue
        task = require_task(find_task(loss, outputs.shape[1:], targets), metric, loss)
        if metric != AUC:
            summands.append(COUNTS.get(metric, bind_top_k)(task, metric))
    bound = BoundMetrics(names, summands, task)
    # The functions of the user are called once before training.
    observation = bound.observe(outputs, targets)
    bound.finish(bound.counts(observation), bound.sums(observation), lambda: 0.0)
    return bound
