"""Adam with decoupled weight decay (Loshchilov and Hutter, 2019, algorithm 2).

    m <- beta1 m + (1 - beta1) g            v <- beta2 v + (1 - beta2) g^2
    w <- (1 - rate decay) w  -  rate (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)

t counts from 1. As in most libraries the decay is multiplied by the rate, not by the schedule
alone, and all parameters decay, biases too, unless `exempt_vectors` is set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from hpctrain.config import options
from hpctrain.core.xp import Array, fused, namespace, on_device
from hpctrain.optim.norms import clip_factor, decayed, runs
from hpctrain.optim.optimizer import (
    BLOCK,
    CommonOptions,
    Fraction,
    NotNegative,
    Optimizer,
    Positive,
    Schedule,
    State,
    TensorSlot,
    Total,
    blocks,
    rate_of,
    require,
    start,
)


class _AdamWConstants(NamedTuple):
    rate: float | Schedule
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    exempt_vectors: bool
    clip_norm: float | None


def adamw(
    rate: float | Schedule,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.01,
    exempt_vectors: bool = False,
    clip_norm: float | None = None,
) -> Optimizer:
    """Return AdamW; `rate` is a number or a function of the 0-based step.

    With `exempt_vectors` tensors of one dim, such as biases, do not decay; gradients whose norm,
    all together, is beyond `clip_norm` count as if scaled down to it. The state is "mean" and
    "square". Raises UsageError unless 0 <= beta1, beta2 < 1, epsilon > 0, weight_decay >= 0 and
    clip_norm > 0.
    """
    check("adamw", beta1, beta2, epsilon, weight_decay, clip_norm)
    numbers = _AdamWConstants(rate, beta1, beta2, epsilon, weight_decay, exempt_vectors, clip_norm)
    return Optimizer(
        partial(start, names=["mean", "square"]),
        partial(_update, numbers),
        rate,
        clip_norm is not None,
    )


def check(
    name: str,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    clip_norm: float | None,
) -> None:
    """Raise UsageError for numbers with which neither AdamW nor LAMB works."""
    require(name, "in [0, 1)", beta1=beta1, beta2=beta2)
    # The gaps between tensors have no gradient: with epsilon 0 they would become 0 / 0.
    require(name, "above 0", epsilon=epsilon, clip_norm=clip_norm)
    require(name, "at least 0", weight_decay=weight_decay)


def _update(
    a: _AdamWConstants,
    grad: Array,
    state: State,
    param: Array,
    slots: Sequence[TensorSlot],
    total: Total,
) -> None:
    updates = int(state["step"][0])
    rate, clip = rate_of(a.rate, updates), clip_factor(grad, a.clip_norm, total)
    # Both corrections are factors of whole blocks; folded in, they cost no pass of their own.
    step = rate / (1 - a.beta1 ** (updates + 1))
    grow = 1 / math.sqrt(1 - a.beta2 ** (updates + 1))
    state["step"] += 1
    if on_device(param):
        for s, decay in runs(param.size, slots, a.exempt_vectors and a.weight_decay > 0):
            keep = 1 - rate * a.weight_decay * decay
            arrays = (param[s], state["mean"][s], state["square"][s], grad[s])
            follow = following(clip, a.beta1, a.beta2)
            fused(_adamw, param)(*arrays, *follow, keep, step, grow, a.epsilon)
        return
    scratch = namespace(param).empty(min(BLOCK, param.size), param.dtype)
    parts = decayed(param.size, slots, a.exempt_vectors)
    for s, decays in zip(blocks(param.size), parts, strict=True):
        m, v, t = state["mean"][s], state["square"][s], scratch[: s.stop - s.start]
        moments(m, v, grad[s], clip, a.beta1, a.beta2, t)
        for p in decays if a.weight_decay else ():
            param[p] *= 1 - rate * a.weight_decay
        direction(m, v, step, grow, a.epsilon, t)
        param[s] -= t


def _adamw(
    xp: Any,
    w: Array,
    m: Array,
    v: Array,
    g: Array,
    beta1: float,
    new1: float,
    beta2: float,
    new2: float,
    keep: float,
    step: float,
    grow: float,
    epsilon: float,
) -> None:
    follow(m, v, g, beta1, new1, beta2, new2)
    w *= keep
    w -= direction_in_kernel(xp, m, v, step, grow, epsilon)


def following(clip: float, beta1: float, beta2: float) -> tuple[float, float, float, float]:
    """Return the numbers for `follow`, in which a kernel computes with arrays alone."""
    return beta1, clip * (1 - beta1), beta2, clip * clip * (1 - beta2)


def follow(
    m: Array, v: Array, g: Array, beta1: float, new1: float, beta2: float, new2: float
) -> None:
    """As `moments`, in a kernel."""
    m *= beta1
    m += g * new1
    v *= beta2
    v += g * g * new2


def direction_in_kernel(
    xp: Any, m: Array, v: Array, step: float, grow: float, epsilon: float
) -> Array:
    """Return the array that `direction` writes, in a kernel."""
    return m / (xp.sqrt(v) * grow + epsilon) * step


def moments(
    m: Array, v: Array, g: Array, clip: float, beta1: float, beta2: float, t: Array
) -> None:
    """Move the mean `m` and the mean square `v` towards `clip` times g, with scratch `t`."""
    xp = namespace(g)
    m *= beta1
    m += xp.multiply(g, clip * (1 - beta1), out=t)
    v *= beta2
    xp.multiply(g, g, out=t)
    t *= clip * clip * (1 - beta2)
    v += t


def direction(m: Array, v: Array, step: float, grow: float, epsilon: float, t: Array) -> None:
    """Write `step` m / (`grow` sqrt(v) + epsilon) into `t`."""
    xp = namespace(m)
    xp.sqrt(v, out=t)
    t *= grow
    t += epsilon
    xp.divide(m, t, out=t)
    t *= step


@options
class AdamWOptions(CommonOptions):
    """`[optimizer] kind = "adamw"`."""

    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.01
    exempt_vectors: bool = False

    def build(self, schedule: Schedule) -> Optimizer:
        """Return the optimizer that follows `schedule`, which was made from `rate`."""
        return adamw(
            schedule,
            self.beta1,
            self.beta2,
            self.epsilon,
            self.weight_decay,
            self.exempt_vectors,
            self.clip_norm,
        )
