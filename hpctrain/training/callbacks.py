"""Callbacks: called with each row of metrics on every rank; any of them may end the training.

A callback is a function of one row, a dict as in metrics.jsonl. It returns None to go on, True or
a text, the reason, to stop; a stop on one rank stops all ranks at that row. After a resume the last
row is passed again, so that a callback that has stopped the run stops it again.

For an object with `begin(rows)`, `begin` is called with the earlier rows, none in a new run, and
returns the function. Its state is a function of the rows of one run: nothing needs to be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from hpctrain import config
from hpctrain.core.errors import HpctrainError
from hpctrain.core.metrics import Criterion, Direction, make_criterion

__all__ = ["Callbacks", "EarlyStop"]

Row = dict[str, Any]
Function = Callable[[Row], Any]


@config.options
class EarlyStop:
    """Stop when `metric` has not improved by more than `min_delta` in `patience` values.

    Metrics of the test set are compared at each evaluation, those of the training set at each row.
    With `direction` "min" the metric improves when it falls, with "max" when it rises; by default
    a loss falls and an accuracy rises. Raises UsageError for an unknown metric.
    """

    patience: Annotated[int, Field(ge=1)]
    metric: str = "test_loss"
    direction: Direction | None = None
    min_delta: Annotated[float, Field(ge=0)] = 0.0

    def __post_init__(self) -> None:
        """Raise UsageError for an unknown metric."""
        _ = self.criterion

    @property
    def criterion(self) -> Criterion:
        """The metric with its direction."""
        return make_criterion(self.metric, self.direction, "[early_stop] metric")

    def begin(self, rows: Sequence[Row]) -> Function:
        """Return the function that receives the rows after `rows`."""
        patience = _Patience(self)
        for row in rows:
            patience(row)
        return patience


class _Patience:
    """The state of early stop in one run: the best value, and the number of values since then."""

    def __init__(self, options: EarlyStop):
        self._options, self._criterion, self._count = options, options.criterion, 0
        self._best: float | None = None
        self._best_step = 0

    def __call__(self, row: Row) -> str | None:
        """Compare the value of a row; return the reason to stop, if there is one."""
        options, value = self._options, row.get(self._options.metric)
        # A row cut short by a stop is left out: an uninterrupted run does not have it.
        if value is None or row.get("interrupted"):
            return None
        if self._criterion.better(value, self._best, options.min_delta):
            self._best, self._best_step, self._count = value, row["step"], 0
        else:
            self._count += 1
        return self._reason() if self._count >= options.patience else None

    def _reason(self) -> str:
        metric = self._options.metric
        best = "" if self._best is None else f" on {self._best:.6g} of step {self._best_step}"
        return f"early stop: {metric} has not improved{best} in {self._count} values"


class Callbacks:
    """The callbacks of one rank in one call of fit; ranks may have different ones."""

    def __init__(self, callbacks: Sequence[Any], gather: Callable[[str], list[str]]):
        """Take the rank's own; `gather` returns every rank's text."""
        self._own, self._gather = list(callbacks), gather
        self._functions: list[tuple[str, Function]] = []
        self._in_use = False

    def begin(self, rows: Sequence[Row]) -> str:
        """Begin after `rows`; return the reason to stop at once, '' to go on; collective."""
        self._in_use = any(self._gather("some" if self._own else ""))
        self._functions = [(_name(callback), _begin(callback, rows[:-1])) for callback in self._own]
        return self.call(rows[-1]) if rows else ""

    def call(self, row: Row) -> str:
        """Pass on a row; return the reason to stop, equal on all ranks, '' to go on; collective."""
        if not self._in_use:
            return ""
        answers = [_answer(name, function, dict(row)) for name, function in self._functions]
        reasons = self._gather("; ".join(dict.fromkeys(filter(None, answers))))
        return "; ".join(dict.fromkeys(filter(None, reasons)))


def _begin(callback: Any, rows: Sequence[Row]) -> Function:
    begin = getattr(callback, "begin", None)
    if begin is None:
        return callback
    return _call(_name(callback), begin, list(rows))


def _answer(name: str, function: Function, row: Row) -> str:
    answer = _call(name, function, row)
    if isinstance(answer, str):
        return answer
    if answer is None or isinstance(answer, bool | np.bool_):
        return f"callback {name} asked to stop at step {row['step']}" if answer else ""
    raise HpctrainError(
        f"callback {name} returned {answer!r}; expected None to go on, True or a reason to stop"
    )


def _call(name: str, function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except Exception as error:
        raise HpctrainError(f"callback {name}: {type(error).__name__}: {error}") from error


def _name(callback: Any) -> str:
    return getattr(callback, "__qualname__", type(callback).__qualname__)
