"""Stochastic gradient descent with heavy-ball momentum (Polyak, 1964).

    v <- momentum v + g
    w <- w - rate v

The rate stands outside v, so that a changing rate acts at once on all of v; the form in which
Goyal et al. (2017, section 3) state their rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import pydantic

from hpctrain.config import options
from hpctrain.errors import UsageError
from hpctrain.optim.optimizer import (
    BLOCK,
    Optimizer,
    Schedule,
    Slot,
    State,
    Total,
    blocks,
    rate_of,
    start,
)
from hpctrain.xp import Array, namespace


def sgd(rate: float | Schedule, momentum: float = 0.0) -> Optimizer:
    """Return SGD; `rate` is a number or a function of the 0-based step.

    The state is "momentum" (none for momentum 0). Raises UsageError unless 0 <= momentum < 1.
    """
    if not 0 <= momentum < 1:
        raise UsageError(f"sgd: momentum must be in [0, 1), seen {momentum}")
    names = ["momentum"] if momentum else []
    return Optimizer(partial(start, names=names), partial(_update, rate, momentum))


def _update(
    rate: float | Schedule,
    momentum: float,
    grad: Array,
    state: State,
    param: Array,
    slots: Sequence[Slot],
    total: Total,
) -> None:
    now = rate_of(rate, int(state["step"][0]))
    xp = namespace(param)
    # Made anew each time: held over, it would be shared by ranks that are threads.
    scratch = xp.empty(min(BLOCK, param.size), param.dtype)
    for s in blocks(param.size):
        velocity, step = grad[s], scratch[: s.stop - s.start]
        if momentum:
            velocity = state["momentum"][s]
            velocity *= momentum
            velocity += grad[s]
        xp.multiply(velocity, now, out=step)
        param[s] -= step
    state["step"] += 1


@options
class SgdOptions:
    """`[optimizer] kind = "sgd"`."""

    rate: Annotated[float, pydantic.Field(gt=0)]
    momentum: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.0

    def build(self, schedule: Schedule) -> Optimizer:
        """Return the optimizer that follows `schedule`, which was made from `rate`."""
        return sgd(schedule, self.momentum)
