"""Callbacks: hooks of a run, called on the ranks that have them; any may end the training.

A callback is a function of a row, a dict as in metrics.jsonl, or an object with some of:

    on_begin(run)          before the first step, with a Run; may return the callback of this run
    on_row(row)            with each row of metrics
    on_epoch(row)          with the row at the end of an epoch, after on_row
    on_checkpoint(folder)  after a checkpoint was saved, with its folder
    on_end(summary)        at the end of the run, also if it was stopped or failed on all ranks
    save_state()           before each row: JSON data, which checkpoints and the other ranks keep

A function, on_row and on_epoch return None to go on, True or a text, the reason, to stop; a stop
on one rank stops all ranks at that row. After a resume, or the loss of ranks, on_begin is called
with the earlier rows and the state before the last one, which is passed again, so that a callback
that has stopped the run stops it again. Hooks must call no collective operation, unless all ranks
have the callback.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from hpctrain.collectives.small_messages import gather_distinct
from hpctrain.core import config
from hpctrain.core.errors import HpctrainError, ModelError, UsageError
from hpctrain.core.metrics import Criterion, Direction, make_criterion
from hpctrain.core.names import unknown
from hpctrain.gradients.arena import Arena

if TYPE_CHECKING:
    from hpctrain.training.evaluation import Evaluation
    from hpctrain.world import World

__all__ = ["Callbacks", "EarlyStop", "FirstRank", "Run"]

Row = dict[str, Any]
HOOKS = ("on_begin", "on_row", "on_epoch", "on_checkpoint", "on_end", "save_state")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """The run that a callback observes, on one rank."""

    world: World
    model: Any
    arena: Arena
    folder: Path | None  #: None if `fit` has no folder
    rows: Sequence[Row]  #: the rows of the run before this part, but for the last one
    state: Any = (
        None  #: JSON data that `save_state` of this callback returned on rank 0 after these
    )

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of this rank by name, views: copy the arrays that you keep.

        With an engine whose workers differ between averages the callback sees this worker's values.
        """
        return self.arena.views(self.arena.param)


@config.options
class EarlyStop:
    """Stop when `metric` has not improved by more than `min_delta` in `patience` values.

    Metrics of the test set are compared at each evaluation, training metrics at each row.
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

    def on_begin(self, run: Run) -> _Patience:
        """Recompute the state from the earlier rows, so that nothing needs to be saved."""
        patience = _Patience(self)
        for row in run.rows:
            patience.on_row(row)
        return patience


class _Patience:
    """The state of early stop in one run: the best value, and the number of values since then."""

    def __init__(self, options: EarlyStop):
        self._options, self._criterion, self._count = options, options.criterion, 0
        self._best_value: float | None = None
        self._best_step = 0

    def on_row(self, row: Row) -> str | None:
        """Compare the value of a row; return the reason to stop, if there is one."""
        options, value = self._options, row.get(self._options.metric)
        # A row cut short by a stop is left out: an uninterrupted run does not have it.
        if value is None or row.get("interrupted"):
            return None
        if self._criterion.better(value, self._best_value, options.min_delta):
            self._best_value, self._best_step, self._count = value, row["step"], 0
        else:
            self._count += 1
        if self._count < options.patience:
            return None
        best = (
            ""
            if self._best_value is None
            else f" on {self._best_value:.6g} of step {self._best_step}"
        )
        return f"early stop: {options.metric} has not improved{best} in {self._count} values"


@dataclass(frozen=True)
class FirstRank:
    """The callback that `make()` returns, on rank 0 alone; every rank passes it to its Trainer.

    If rank 0 is lost, the rank that takes its place makes the callback anew.
    """

    make: Callable[[], Any]


class Callbacks:
    """This rank's callbacks in a call of fit; ranks may have different callbacks."""

    def __init__(self, callbacks: Sequence[Any], world: World, model: Any, steps_per_epoch: int):
        """Take the rank's own callbacks. Raises UsageError for an object without hooks."""
        self._world, self._model = world, model
        self._epoch, self._in_use = steps_per_epoch, False
        self.saved: Row = {}  #: the states of rank 0's callbacks, and the step of the next row
        self._active = {  # by the number in `callbacks`
            number: item.make() if isinstance(item, FirstRank) else item
            for number, item in enumerate(callbacks)
            if world.rank == 0 or not isinstance(item, FirstRank)
        }
        for callback in self._active.values():
            if not callable(callback) and not any(hasattr(callback, hook) for hook in HOOKS):
                raise UsageError(
                    f"callback {callback!r}: expected a function, or an object with one of "
                    f"{', '.join(HOOKS)}"
                )
        self._names = {number: _callback_name(item) for number, item in self._active.items()}

    def share_names(self, earlier: Sequence[str]) -> list[str]:
        """Gather the names of callbacks; warn of `earlier` names that are missing; collective."""
        own_names_json = json.dumps([[*self._names.values()], [*earlier]])
        pairs = map(json.loads, gather_distinct(self._world.link, own_names_json))
        names, earlier_names = ({*chain(*lists)} for lists in zip(*pairs, strict=True))
        self._in_use = bool(names)
        if (lost_names := earlier_names - names) and self._world.rank == 0:
            log.warning(
                "callback %s was on lost ranks alone, and is called no more; pass "
                "ht.callbacks.FirstRank(make) on all ranks",
                ", ".join(sorted(lost_names)),
            )
        return sorted(names)

    def begin(self, rows: Sequence[Row], arena: Arena, folder: Path | None, saved: Row) -> str:
        """Begin after `rows`; return the reason to stop at once, '' to go on; collective.

        `saved`: `self.saved` of the part before.
        """
        next_step = saved.get("step", rows[-1]["step"] if rows else 0)
        earlier_rows = [row for row in rows if row["step"] < next_step]
        for number, item in self._active.items():
            name, state = saved.get("states", {}).get(str(number), ("", None))
            own_state = state if name == self._names[number] else None
            run = Run(self._world, self._model, arena, folder, earlier_rows, own_state)
            self._active[number] = _call_hook(item, "on_begin", run) or item
        reasons = [self.call(row) for row in rows[len(earlier_rows) :]]
        return next(filter(None, reasons), "")

    def call(self, row: Row) -> str:
        """Pass on a row; return the reason to stop, equal on all ranks, '' to go on; collective."""
        if not self._in_use:
            return ""
        hooks = ["on_row"] + ["on_epoch"] * (row["step"] % self._epoch == 0)
        states = self._states() if self._world.rank == 0 else {}
        answers = [
            _stop_reason(item, hook, dict(row)) for item in self._active.values() for hook in hooks
        ]
        own_reasons = "; ".join(dict.fromkeys(filter(None, answers)))
        check = getattr(self._model, "must_be_bound", None)  # of models that callbacks change
        if check is not None:
            try:
                self._world.on_all_ranks(check)
            except UsageError as error:
                raise ModelError(str(error)) from error
        if first_states := self._world.from_first(lambda: states):
            self.saved.update(step=row["step"], states=first_states)
        return "; ".join(filter(None, gather_distinct(self._world.link, own_reasons)))

    def _states(self) -> dict[int, tuple[str, Any]]:
        """Return the name and the state of each callback with a method `save_state`."""
        states = {
            number: (self._names[number], _call_hook(item, "save_state"))
            for number, item in self._active.items()
            if hasattr(item, "save_state")
        }
        try:
            json.dumps(states, allow_nan=False)
        except (TypeError, ValueError) as error:
            names = ", ".join(name for name, _ in states.values())
            raise HpctrainError(f"save_state of {names}: expected JSON data: {error}") from error
        return states

    def checkpoint(self, folder: Path) -> None:
        """Pass on the folder of a checkpoint."""
        for item in self._active.values():
            _call_hook(item, "on_checkpoint", folder)

    def end(self, summary: dict[str, Any]) -> None:
        """Pass on the summary; a callback that fails cannot replace the reason of another end."""
        for item in self._active.values():
            try:
                _call_hook(item, "on_end", dict(summary))
            except HpctrainError as error:
                if summary["status"] == "done":
                    raise
                log.warning("%s", error)


def _stop_reason(callback: Any, hook: str, row: Row) -> str:
    """Return the reason to stop that a hook gives, '' for none."""
    answer = _call_hook(callback, hook, row)
    if isinstance(answer, str):
        return answer
    if answer is None or isinstance(answer, bool | np.bool_):
        return (
            f"callback {_callback_name(callback)} asked to stop at step {row['step']}"
            if answer
            else ""
        )
    raise HpctrainError(
        f"callback {_callback_name(callback)} returned {answer!r}; expected None to go on, True or "
        "a reason to stop"
    )


def _call_hook(callback: Any, hook: str, *arguments: Any) -> Any:
    """Return the result of a hook, None if the callback lacks it."""
    function = getattr(callback, hook, None)
    if function is None and hook == "on_row" and callable(callback):
        function = callback
    try:
        return None if function is None else function(*arguments)
    except Exception as error:
        raise HpctrainError(
            f"callback {_callback_name(callback)}: {type(error).__name__}: {error}"
        ) from error


def _callback_name(callback: Any) -> str:
    return getattr(callback, "__qualname__", type(callback).__qualname__)


def check_metrics(
    evaluation: Evaluation, callbacks: Sequence[Any], keep_best: str | None, has_test_set: bool
) -> None:
    """Raise UsageError if early stop or keep_best needs a metric that no row has."""
    loss = evaluation.loss
    metric_names = [f"test_{name}" for name in evaluation.scalars]
    metric_names += [f"train_{name}" for name in loss.metrics]
    users = [("early stop", c.metric) for c in callbacks if isinstance(c, EarlyStop)]
    for user, metric in [*users, ("keep_best", keep_best)]:
        if metric and metric not in metric_names:
            raise UsageError(
                f"{user}: {unknown('metric', metric, metric_names)}; the loss of the model is "
                f"{loss!r}"
            )
        if metric and metric.startswith("test") and not has_test_set:
            raise UsageError(
                f"{user} needs {metric}, but there is no test set to evaluate on; "
                "add one, or use train_loss"
            )
