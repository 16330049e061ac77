"""Schedules: the rate as a function of the 0-based step alone, not of the history of a run."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated

import pydantic

from hpctrain.config import options
from hpctrain.optim.optimizer import Schedule

MOST_EPOCHS = 1e9  #: longer than any run; times the steps of an epoch it is still a number
Epochs = Annotated[float, pydantic.Field(ge=0, le=MOST_EPOCHS)]
Mark = Annotated[float, pydantic.Field(gt=0, le=MOST_EPOCHS)]


def constant(rate: float) -> Schedule:
    """Return the schedule that is always `rate`."""
    return lambda step: rate


def cosine(rate: float, steps: int) -> Schedule:
    """Return half a cosine from `rate` at step 0 to 0 at `steps` and after.

    Source: Loshchilov and Hutter (2017), equation 5, without restarts.
    """
    return lambda step: rate * 0.5 * (1 + math.cos(math.pi * min(step / steps, 1.0)))


def step(rate: float, at: Sequence[int], factor: float) -> Schedule:
    """Return the schedule that begins with `rate` and is multiplied by `factor` at each of `at`.

    Source: Goyal et al. (2017, section 5.1), with epochs 30, 60 and 80 and a factor of 0.1.
    """
    marks = sorted(at)
    return lambda step: rate * factor ** bisect_right(marks, step)


def warm_up(rate: float, steps: int, after: Schedule) -> Schedule:
    """Return a straight line that meets `rate` in `steps` steps, then `after` from its step 0.

    The first step has `rate / steps`, not 0, which would waste it. Source: Goyal et al. (2017).
    """
    return lambda step: rate * (step + 1) / steps if step < steps else after(step - steps)


@options
class ConstantOptions:
    """`[schedule] kind = "constant"`."""

    warm_up_epochs: Epochs = 0.0

    def build(self, rate: float, steps_per_epoch: int, total_steps: int) -> Schedule:
        """Return the schedule of a run; one shorter than its warm-up ends on the way up."""
        return warm_up(rate, round(self.warm_up_epochs * steps_per_epoch), constant(rate))


@options
class CosineOptions:
    """`[schedule] kind = "cosine"`."""

    warm_up_epochs: Epochs = 0.0

    def build(self, rate: float, steps_per_epoch: int, total_steps: int) -> Schedule:
        """Return the schedule of a run; one shorter than its warm-up ends on the way up."""
        first = round(self.warm_up_epochs * steps_per_epoch)
        return warm_up(rate, first, cosine(rate, max(1, total_steps - first)))


@options
class StepOptions:
    """`[schedule] kind = "step"`: epochs are counted from the start of the run, warm-up too."""

    at_epochs: Annotated[list[Mark], pydantic.Field(min_length=1)]
    factor: Annotated[float, pydantic.Field(gt=0, lt=1)] = 0.1
    warm_up_epochs: Epochs = 0.0

    def build(self, rate: float, steps_per_epoch: int, total_steps: int) -> Schedule:
        """Return the schedule of a run."""
        first = round(self.warm_up_epochs * steps_per_epoch)
        at = [round(epoch * steps_per_epoch) - first for epoch in self.at_epochs]
        return warm_up(rate, first, step(rate, at, self.factor))
