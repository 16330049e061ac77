"""LARS: SGD with a rate scaled by each tensor's norm (You, Gitman and Ginsburg, 2017, alg. 1).

    l = trust |w| / (|g| + decay |w|)                for each tensor; g clipped with `clip_norm`
    v <- momentum v + rate l (g + decay w)
    w <- w - v

So no tensor changes by more than a fraction of its own norm, and large batches can have large
rates. Unless `exempt_vectors` is off, 1-d tensors (biases, norms) have l = 1 and do not
decay, as in all record runs of LARS: their norms carry no information. l is also 1 for a tensor of
zeros, and where the divisor is zero (no gradient and no decay). Without
a gradient l = trust / decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from hpctrain.core.config import options
from hpctrain.core.xp import Array, fused, on_device
from hpctrain.optim.norms import (
    clip_factor,
    is_vector,
    piece_ranges,
    pieces,
    safe_ratio,
    slot_pieces,
    sum_by_slot,
    sum_squares_by_piece,
)
from hpctrain.optim.optimizer import (
    BLOCK_ELEMENTS,
    CommonOptions,
    Fraction,
    GatherRows,
    NonNegativeFloat,
    Optimizer,
    PositiveFloat,
    Schedule,
    State,
    TensorSlot,
    build,
    initial_state,
    rate_at,
)


@options
class LarsOptions(CommonOptions):
    """`[optimizer] kind = "lars"`."""

    momentum: Fraction = 0.9
    weight_decay: NonNegativeFloat = 0.0
    trust: PositiveFloat = 0.001
    exempt_vectors: bool = True

    def build(self, rate: float | Schedule) -> Optimizer:
        """Return LARS whose rate is `rate`: a number, or a schedule built from `self.rate`."""
        init = partial(initial_state, names=["momentum"])
        return Optimizer(init, partial(_update, self, rate), rate)


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
    return build(LarsOptions, "lars", **locals())


def _update(
    const: LarsOptions,
    schedule: float | Schedule,
    grad: Array,
    state: State,
    param: Array,
    slots: Sequence[TensorSlot],
    gather_rows: GatherRows,
) -> None:
    rate = rate_at(schedule, int(state["step"][0]))
    clip = clip_factor(grad, const.clip_norm, slots, gather_rows)
    _, ranges = piece_ranges(param.size, slots)
    rows = gather_rows(sum_squares_by_piece([param, grad], ranges))
    w_norms, g_norms = np.sqrt(sum_by_slot(rows, slots)).T
    divisors = clip * g_norms + const.weight_decay * w_norms
    trust_ratios = safe_ratio(const.trust * w_norms, divisors)  # l of each slot, float64
    state["step"] += 1
    scratch = [] if on_device(param) else [np.empty(min(BLOCK_ELEMENTS, param.size), param.dtype)]
    pieces_of = slot_pieces if on_device(param) else pieces  # a kernel takes a slot of any length
    for i, elements in pieces_of(param.size, slots):
        is_exempt = const.exempt_vectors and is_vector(slots[i])
        local_rate = rate if is_exempt else rate * float(trust_ratios[i])
        decay = 0.0 if is_exempt else local_rate * const.weight_decay
        w, v, g = param[elements], state["momentum"][elements], grad[elements]
        fused(_lars_kernel, param)(
            w, v, g, const.momentum, local_rate * clip, decay, *[t[: w.size] for t in scratch]
        )


def _lars_kernel(
    xp: Any,
    w: Array,
    v: Array,
    g: Array,
    momentum: float,
    rate: float,
    decay: float,
    *scratch: Array,
) -> None:
    v *= momentum
    v += xp.multiply(g, rate, *scratch)
    if not scratch or decay:  # a fused kernel does not know its numbers
        v += xp.multiply(w, decay, *scratch)
    w -= v
