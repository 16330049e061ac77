"""Callbacks: told of each row of metrics on every rank, and free to ask that training ends.

A callback is a function of one row, a dict as in metrics.jsonl. It returns None to go on, True or
a text, the reason, to stop; when one rank asks, all stop at that row. After a resume the last row
is told again, so that who asked to stop asks again.

An object with `begin(rows)` is given the rows before that one, none in a new run, and returns the
function. Its state is then that of one run, a function of the rows: nothing needs to be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from hpctrain import config
from hpctrain.errors import HpctrainError
from hpctrain.metrics import Metric, better

Row = dict[str, Any]
Function = Callable[[Row], Any]


@config.options
class EarlyStop:
    """Stop when `metric` has not improved by more than `min_delta` in `patience` looks at it.

    test_loss and test_accuracy are looked at when the model is evaluated, train_loss and
    train_accuracy at each row. A loss improves when it falls, an accuracy when it rises.
    """

    patience: Annotated[int, Field(ge=1)]
    metric: Metric = "test_loss"
    min_delta: Annotated[float, Field(ge=0)] = 0.0

    def begin(self, rows: Sequence[Row]) -> Function:
        """Return the function that is told of the rows after `rows`."""
        patience = _Patience(self)
        for row in rows:
            patience(row)
        return patience


class _Patience:
    """What early stop has seen of one run."""

    def __init__(self, options: EarlyStop):
        self._options, self._waited = options, 0
        self._best: float | None = None
        self._best_step = 0

    def __call__(self, row: Row) -> str | None:
        """Look at a row; return the reason to stop, if there is one."""
        options, value = self._options, row.get(self._options.metric)
        # The run that was never stopped has no row that was cut short.
        if value is None or row.get("interrupted"):
            return None
        if better(options.metric, value, self._best, options.min_delta):
            self._best, self._best_step, self._waited = value, row["step"], 0
        else:
            self._waited += 1
        return self._reason() if self._waited >= options.patience else None

    def _reason(self) -> str:
        best = "" if self._best is None else f" on {self._best:.6g} of step {self._best_step}"
        return f"early stop: {self._options.metric} has not improved{best} in {self._waited} looks"


class Callbacks:
    """The callbacks of one rank in one call of fit; ranks may have different ones."""

    def __init__(self, callbacks: Sequence[Any], gather: Callable[[str], list[str]]):
        """Take the rank's own; `gather` returns every rank's text."""
        self._own, self._gather = list(callbacks), gather
        self._functions: list[tuple[str, Function]] = []
        self._any = False

    def begin(self, rows: Sequence[Row]) -> str:
        """Begin after `rows`; return why to stop already here, '' to go on; collective."""
        self._any = any(self._gather("some" if self._own else ""))
        self._functions = [(_name(one), _began(one, rows[:-1])) for one in self._own]
        return self.tell(rows[-1]) if rows else ""

    def tell(self, row: Row) -> str:
        """Tell a row; return why to stop, the same on all ranks, '' to go on; collective."""
        if not self._any:
            return ""
        asked = [_answer(name, function, dict(row)) for name, function in self._functions]
        said = self._gather("; ".join(dict.fromkeys(filter(None, asked))))
        return "; ".join(dict.fromkeys(filter(None, said)))


def _began(callback: Any, rows: Sequence[Row]) -> Function:
    begin = getattr(callback, "begin", None)
    if begin is None:
        return callback
    return _called(_name(callback), begin, list(rows))


def _answer(name: str, function: Function, row: Row) -> str:
    said = _called(name, function, row)
    if isinstance(said, str):
        return said
    if said is None or isinstance(said, bool | np.bool_):
        return f"callback {name} asked to stop at step {row['step']}" if said else ""
    raise HpctrainError(
        f"callback {name} returned {said!r}; expected None to go on, True or a reason to stop"
    )


def _called(name: str, function: Callable[[Any], Any], told: Any) -> Any:
    try:
        return function(told)
    except Exception as error:
        raise HpctrainError(f"callback {name}: {type(error).__name__}: {error}") from error


def _name(callback: Any) -> str:
    return getattr(callback, "__qualname__", type(callback).__qualname__)
