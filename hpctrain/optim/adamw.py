"""Adam with decoupled weight decay (Loshchilov and Hutter, 2019, algorithm 2).

    m <- beta1 m + (1 - beta1) g            v <- beta2 v + (1 - beta2) g^2
    w <- (1 - rate decay) w  -  rate (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)

t counts from 1. As in most libraries the decay is multiplied by the rate, not by the schedule
alone, and all parameters decay, biases too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, NamedTuple

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


class _Numbers(NamedTuple):
    rate: float | Schedule
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


def adamw(
    rate: float | Schedule,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.01,
) -> Optimizer:
    """Return AdamW; `rate` is a number or a function of the 0-based step.

    The state is "mean" and "square". Raises UsageError unless 0 <= beta1, beta2 < 1, epsilon > 0
    and weight_decay >= 0.
    """
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise UsageError(f"adamw: beta1 and beta2 must be in [0, 1), seen {beta1} and {beta2}")
    # The gaps between tensors have no gradient: with epsilon 0 they would become 0 / 0.
    if not (epsilon > 0 and weight_decay >= 0):
        raise UsageError(
            f"adamw: expected epsilon > 0 and weight_decay >= 0, seen {epsilon} and {weight_decay}"
        )
    numbers = _Numbers(rate, beta1, beta2, epsilon, weight_decay)
    return Optimizer(partial(start, names=["mean", "square"]), partial(_update, numbers))


def _update(
    a: _Numbers, grad: Array, state: State, param: Array, slots: Sequence[Slot], total: Total
) -> None:
    done = int(state["step"][0])
    rate = rate_of(a.rate, done)
    # Both corrections are factors of whole blocks; folded in, they cost no pass of their own.
    step = rate / (1 - a.beta1 ** (done + 1))
    grow = 1 / math.sqrt(1 - a.beta2 ** (done + 1))
    scratch = namespace(param).empty(min(BLOCK, param.size), param.dtype)
    for s in blocks(param.size):
        m, v, w, t = state["mean"][s], state["square"][s], param[s], scratch[: s.stop - s.start]
        _moments(a, grad[s], m, v, t)
        _step(m, v, w, t, step, grow, a.epsilon, 1 - rate * a.weight_decay)
    state["step"] += 1


def _moments(a: _Numbers, g: Array, m: Array, v: Array, t: Array) -> None:
    xp = namespace(g)
    m *= a.beta1
    m += xp.multiply(g, 1 - a.beta1, out=t)
    v *= a.beta2
    xp.multiply(g, g, out=t)
    t *= 1 - a.beta2
    v += t


def _step(
    m: Array, v: Array, w: Array, t: Array, step: float, grow: float, epsilon: float, keep: float
) -> None:
    xp = namespace(w)
    xp.sqrt(v, out=t)
    t *= grow
    t += epsilon
    xp.divide(m, t, out=t)
    t *= step
    w *= keep
    w -= t


@options
class AdamWOptions:
    """`[optimizer] kind = "adamw"`."""

    rate: Annotated[float, pydantic.Field(gt=0)]
    beta1: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.999
    epsilon: Annotated[float, pydantic.Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, pydantic.Field(ge=0)] = 0.01

    def build(self, schedule: Schedule) -> Optimizer:
        """Return the optimizer that follows `schedule`, which was made from `rate`."""
        return adamw(schedule, self.beta1, self.beta2, self.epsilon, self.weight_decay)
