"""The options of an optimizer of PyTorch at each update, as a scheduler changes them.

A scheduler is stepped after each update, on the groups of the user's own optimizer: whatever it
changes there is used, of each group. Updates may ask for earlier steps than the last one: workers
of an asynchronous engine are ahead of the servers, and a training may begin again.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hpctrain.core.errors import UsageError

#: A scheduler of the optimizer, or a function that makes one for it.
Schedule: TypeAlias = "LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler]"
RECENT = 256  #: steps whose options are kept: as far as workers may be ahead of servers
#: Classes of `torch.optim.lr_scheduler`; subclasses of LRScheduler of the user's own are used, too.
SCHEDULERS = {
    "LRScheduler": "used",
    "ChainedScheduler": "used",
    "ConstantLR": "used",
    "CosineAnnealingLR": "used",
    "CosineAnnealingWarmRestarts": "used",
    "CyclicLR": "used",
    "ExponentialLR": "used",
    "LambdaLR": "used",
    "LinearLR": "used",
    "MultiStepLR": "used",
    "MultiplicativeLR": "used",
    "OneCycleLR": "used",
    "PolynomialLR": "used",
    "SequentialLR": "used",
    "StepLR": "used",
    "SWALR": "used",
    "ReduceLROnPlateau": "refused",
}


class ScheduledOptions:
    """The options of each group of an optimizer, as functions of the 0-based step."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule | None):
        """Take the scheduler's state as it stands; raise UsageError for one that does not fit."""
        self._optimizer, self._group_count = optimizer, len(optimizer.param_groups)
        self.scheduler = None if schedule is None else as_scheduler(optimizer, schedule)
        self._lock = Lock()  # of servers and workers that are threads of one rank
        self._start = self._values(), self._copy_state()
        self._rates = array("d", [self._rate()])
        self._position, self._recent = 0, {0: self._start[0]}

    def __call__(self, step: int) -> float:
        """Return the rate of the first group, for the metrics."""
        if self.scheduler is None:
            return self._rate()
        with self._lock:
            self._advance(step)
            return self._rates[step]

    def at(self, step: int) -> list[dict[str, Any]]:
        """Return the options of each group; those of the last step as they are now."""
        if len(self._optimizer.param_groups) != self._group_count:
            raise UsageError(
                f"optimizer: expected the {self._group_count} groups with which the Trainer was "
                f"made, seen {len(self._optimizer.param_groups)}; make a new Trainer after "
                "add_param_group"
            )
        if self.scheduler is None:
            return self._values()
        with self._lock:
            if step < self._position and step not in self._recent:
                self._rewind()
            self._advance(step)
            return self._values() if step == self._position else self._recent[step]

    def _advance(self, step: int) -> None:
        """Step the scheduler until the update of `step`."""
        assert self.scheduler is not None
        while self._position < step:
            self._optimizer._opt_called = True  # else it warns
            self.scheduler.step()
            self._position += 1
            self._recent[self._position] = self._values()
            self._recent.pop(self._position - RECENT, None)
            if len(self._rates) == self._position:
                self._rates.append(self._rate())

    def _rewind(self) -> None:
        """Return to the state in which the Trainer was made."""
        values, state = self._start
        if state is None:
            raise UsageError(
                "schedule: expected a scheduler whose state can be copied, to return to an earlier "
                f"step, seen {type(self.scheduler).__name__}; make a new one"
            )
        assert self.scheduler is not None
        self.scheduler.load_state_dict(copy.deepcopy(state))
        for group, options in zip(self._optimizer.param_groups, values, strict=True):
            group.update({name: copy.deepcopy(value) for name, value in options.items()})
        self._position, self._recent = 0, {0: values}

    def _values(self) -> list[dict[str, Any]]:
        return [
            {name: _own_value(group[name]) for name in self._optimizer.defaults}
            for group in self._optimizer.param_groups
        ]

    def _rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def _copy_state(self) -> dict[str, Any] | None:
        if self.scheduler is not None:
            with suppress(TypeError, RuntimeError):  # of what cannot be copied
                return copy.deepcopy(self.scheduler.state_dict())
        return None


def as_scheduler(optimizer: torch.optim.Optimizer, schedule: Schedule) -> LRScheduler:
    """Return the scheduler of `optimizer`: `schedule`, or the one that it makes."""
    is_made = isinstance(schedule, LRScheduler | ReduceLROnPlateau) or not callable(schedule)
    scheduler: Any = schedule if is_made else schedule(optimizer)
    for part in _parts(scheduler):
        if isinstance(part, ReduceLROnPlateau):
            raise UsageError(
                "schedule: expected a scheduler of the number of updates, seen ReduceLROnPlateau, "
                "which needs a metric; step it in a callback, whose row has the metrics: rates "
                "that it sets are used, where no schedule is given"
            )
        if not isinstance(part, LRScheduler):
            raise UsageError(
                "schedule: expected a scheduler of torch.optim.lr_scheduler or a function that "
                f"makes one for the optimizer, seen {type(part).__name__}"
            )
        if part.optimizer is not optimizer:
            raise UsageError(
                f"schedule: expected a scheduler of the optimizer beside it, seen "
                f"{type(part).__name__} of another optimizer; make it with the one that is given"
            )
    return scheduler


def _parts(scheduler: Any) -> list[Any]:
    """Return a scheduler and those that it steps."""
    parts = [scheduler]
    for part in parts:
        parts += getattr(part, "_schedulers", ())
    return parts


def _own_value(value: Any) -> Any:
    """Return the value of an option that a scheduler cannot change in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return tuple(map(_own_value, value)) if isinstance(value, tuple | list) else value


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a scheduler was made for `optimizer`."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")
