"""LARS: SGD whose rate follows the size of each tensor (You, Gitman and Ginsburg, 2017, alg. 1).

    l = trust |w| / (|g| + decay |w|)                for each tensor; g clipped with `clip_norm`
    v <- momentum v + rate l (g + decay w)
    w <- w - v

So no tensor moves by more than a share of its own size, and large batches can have large rates.
Tensors of one dim (biases, norms) take l = 1 and do not decay unless `exempt_vectors` is off, as
in all runs of LARS that set records: their sizes say nothing. l is also 1 for a tensor of zeros,
and where the divisor is zero: no gradient and no decay. Without a gradient l = trust / decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hpctrain.config import options
from hpctrain.core.xp import Array, fused, namespace, on_device
from hpctrain.optim.norms import (
    by_slot,
    clip_factor,
    is_vector,
    pieces,
    ratio,
    squares_of,
    wholes,
)
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
    rate_of,
    require,
    start,
)


class _LarsConstants(NamedTuple):
    rate: float | Schedule
    momentum: float
    weight_decay: float
    trust: float
    exempt_vectors: bool
    clip_norm: float | None


def lars(
    rate: float | Schedule,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    trust: float = 0.001,
    exempt_vectors: bool = True,
    clip_norm: float | None = None,
) -> Optimizer:
    """Return LARS; `rate` is a number or a function of the 0-based step.

    The state is "momentum". Raises UsageError unless 0 <= momentum < 1, weight_decay >= 0,
    trust > 0 and clip_norm > 0.
    """
    require("lars", "in [0, 1)", momentum=momentum)
    require("lars", "at least 0", weight_decay=weight_decay)
    require("lars", "above 0", trust=trust, clip_norm=clip_norm)
    numbers = _LarsConstants(rate, momentum, weight_decay, trust, exempt_vectors, clip_norm)
    return Optimizer(partial(start, names=["momentum"]), partial(_update, numbers), rate)


def _update(
    a: _LarsConstants,
    grad: Array,
    state: State,
    param: Array,
    slots: Sequence[TensorSlot],
    total: Total,
) -> None:
    rate, clip = rate_of(a.rate, int(state["step"][0])), clip_factor(grad, a.clip_norm, total)
    trusts = _trusts(a, clip, grad, param, slots, total)
    state["step"] += 1
    if on_device(param):
        for i, at in wholes(param.size, slots):
            exempt = a.exempt_vectors and is_vector(slots[i])
            local = rate if exempt else rate * float(trusts[i])
            decay = 0.0 if exempt else local * a.weight_decay
            arrays = (param[at], state["momentum"][at], grad[at])
            fused(_lars, param)(*arrays, a.momentum, local * clip, decay)
        return
    scratch = namespace(param).empty(min(BLOCK, param.size), param.dtype)
    for i, at in pieces(param.size, slots):
        v, w, t = state["momentum"][at], param[at], scratch[: at.stop - at.start]
        exempt = a.exempt_vectors and is_vector(slots[i])
        local = rate if exempt else rate * float(trusts[i])
        v *= a.momentum
        v += namespace(w).multiply(grad[at], local * clip, out=t)
        if a.weight_decay and not exempt:
            v += namespace(w).multiply(w, local * a.weight_decay, out=t)
        w -= v


def _lars(
    xp: Any, w: Array, v: Array, g: Array, momentum: float, rate: float, decay: float
) -> None:
    v *= momentum
    v += g * rate
    v += w * decay
    w -= v


def _trusts(
    a: _LarsConstants,
    clip: float,
    grad: Array,
    param: Array,
    slots: Sequence[TensorSlot],
    total: Total,
) -> np.ndarray:
    """Return l of each slot, float64."""
    own = squares_of([param, grad], [at for _, at in pieces(param.size, slots)])
    w, g = np.sqrt(by_slot(total(own), slots)).T
    return ratio(a.trust * w, clip * g + a.weight_decay * w)


@options
class LarsOptions(CommonOptions):
    """`[optimizer] kind = "lars"`."""

    momentum: Fraction = 0.9
    weight_decay: NotNegative = 0.0
    trust: Positive = 0.001
    exempt_vectors: bool = True

    def build(self, schedule: Schedule) -> Optimizer:
        """Return the optimizer that follows `schedule`, which was made from `rate`."""
        return lars(
            schedule,
            self.momentum,
            self.weight_decay,
            self.trust,
            self.exempt_vectors,
            self.clip_norm,
        )
