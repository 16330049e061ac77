"""Schedules: the rate as a function of only the 0-based step, not of the history of a run."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated

import pydantic

from hpctrain.core.config import options
from hpctrain.optim.optimizer import Schedule

__all__ = ["constant", "cosine", "step", "warm_up"]

MAX_EPOCHS = 1e9  #: longer than any run; the product with the steps per epoch cannot overflow
Epochs = Annotated[float, pydantic.Field(ge=0, le=MAX_EPOCHS)]
PositiveEpochs = Annotated[float, pydantic.Field(gt=0, le=MAX_EPOCHS)]


def constant(rate: float) -> Schedule:
    """Return a schedule with the constant `rate`."""
    return lambda step: rate


def cosine(rate: float, steps: int) -> Schedule:
    """Return half a cosine from `rate` at step 0 to 0 at step `steps` and later.

    Source: Loshchilov and Hutter (2017), equation 5, without restarts.
    """
    return lambda step: rate * 0.5 * (1 + math.cos(math.pi * min(step / steps, 1.0)))


def step(rate: float, at_steps: Sequence[int], factor: float) -> Schedule:
    """Return a schedule that begins with `rate` and is multiplied by `factor` at `at_steps`.

    Source: Goyal et al. (2017, section 5.1), with epochs 30, 60 and 80 and a factor of 0.1.
    """
    sorted_steps = sorted(at_steps)
    return lambda step: rate * factor ** bisect_right(sorted_steps, step)


def warm_up(rate: float, steps: int, next_schedule: Schedule) -> Schedule:
    """Return a linear warm-up to `rate` in `steps` steps, then `next_schedule` from its step 0.

    The first step has `rate / steps`: a step with rate 0 would be wasted. Source: Goyal et al.
    (2017).
    """
    return lambda step: rate * (step + 1) / steps if step < steps else next_schedule(step - steps)


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
        warm_up_steps = round(self.warm_up_epochs * steps_per_epoch)
        return warm_up(rate, warm_up_steps, cosine(rate, max(1, total_steps - warm_up_steps)))


@options
class StepOptions:
    """`[schedule] kind = "step"`: epochs count from the start of the run, including the warm-up."""

    at_epochs: Annotated[list[PositiveEpochs], pydantic.Field(min_length=1)]
    factor: Annotated[float, pydantic.Field(gt=0, lt=1)] = 0.1
    warm_up_epochs: Epochs = 0.0

    def build(self, rate: float, steps_per_epoch: int, total_steps: int) -> Schedule:
        """Return the schedule of a run."""
        warm_up_steps = round(self.warm_up_epochs * steps_per_epoch)
        at_steps = [round(epoch * steps_per_epoch) - warm_up_steps for epoch in self.at_epochs]
        return warm_up(rate, warm_up_steps, step(rate, at_steps, self.factor))
