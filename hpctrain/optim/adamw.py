"""Adam with decoupled weight decay (Loshchilov and Hutter, 2019, algorithm 2).

    m <- beta1 m + (1 - beta1) g            v <- beta2 v + (1 - beta2) g^2
    w <- (1 - rate decay) w  -  rate (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)

t counts from 1. As in most libraries the decay is multiplied by the rate, not by the schedule
alone. All parameters decay, biases too, unless `exempt_vectors` is set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from hpctrain.core.config import options
from hpctrain.core.xp import Array, fused, namespace, on_device
from hpctrain.optim.norms import clip_factor, find_decaying, kernel_slices
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
    blocks,
    build,
    initial_state,
    rate_at,
)


@options
class AdamWOptions(CommonOptions):
    """`[optimizer] kind = "adamw"`."""

    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    #: Above 0: the gradient is zero in the gaps between tensors, which would become 0 / 0.
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.01
    exempt_vectors: bool = False

    def build(self, rate: float | Schedule) -> Optimizer:
        """Return AdamW whose rate is `rate`: a number, or a schedule built from `self.rate`."""
        init = partial(initial_state, names=["mean", "square"])
        return Optimizer(init, partial(_update, self, rate), rate, self.clip_norm is not None)


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

    With `exempt_vectors` 1-d tensors, such as biases, do not decay. A gradient whose norm
    over all tensors is above `clip_norm` is scaled down to it. The state is "mean" and "square".
    Raises UsageError unless 0 <= beta1, beta2 < 1, epsilon > 0, weight_decay >= 0 and
    clip_norm > 0.
    """
    return build(AdamWOptions, "adamw", **locals())


def _update(
    const: AdamWOptions,
    schedule: float | Schedule,
    grad: Array,
    state: State,
    param: Array,
    slots: Sequence[TensorSlot],
    gather_rows: GatherRows,
) -> None:
    updates = int(state["step"][0])
    rate, clip = rate_at(schedule, updates), clip_factor(grad, const.clip_norm, slots, gather_rows)
    # The bias corrections are scalars: as part of other factors they need no pass over memory.
    step_size = rate / (1 - const.beta1 ** (updates + 1))
    v_correction = 1 / math.sqrt(1 - const.beta2 ** (updates + 1))
    state["step"] += 1
    moments = moment_factors(clip, const.beta1, const.beta2)
    direction = (step_size, v_correction, const.epsilon)
    mean, square, decay_factor = state["mean"], state["square"], 1 - rate * const.weight_decay
    if on_device(param):
        per_slot = const.exempt_vectors and const.weight_decay > 0
        for part, decays in kernel_slices(param.size, slots, per_slot):
            arrays = (param[part], mean[part], square[part], grad[part])
            factors = (decay_factor if decays else 1.0, *moments, *direction)
            fused(_adamw_kernel, param)(*arrays, *factors)
        return
    xp = namespace(param)
    scratch = xp.empty(min(BLOCK_ELEMENTS, param.size), param.dtype)
    decaying_slices = find_decaying(param.size, slots, const.exempt_vectors)
    for block, decaying_parts in zip(blocks(param.size), decaying_slices, strict=True):
        m, v, t = mean[block], square[block], scratch[: block.stop - block.start]
        update_moments(xp, m, v, grad[block], *moments, t)
        for part in decaying_parts if const.weight_decay else ():
            param[part] *= decay_factor
        param[block] -= compute_direction(xp, m, v, *direction, t)


def _adamw_kernel(
    xp: Any, w: Array, m: Array, v: Array, g: Array, decay_factor: float, *factors: float
) -> None:
    update_moments(xp, m, v, g, *factors[:4])
    w *= decay_factor
    w -= compute_direction(xp, m, v, *factors[4:])


def moment_factors(clip: float, beta1: float, beta2: float) -> tuple[float, float, float, float]:
    """Return the four factors of `update_moments` for gradients that are scaled by `clip`."""
    return beta1, clip * (1 - beta1), beta2, clip * clip * (1 - beta2)


def update_moments(
    xp: Any,
    m: Array,
    v: Array,
    g: Array,
    beta1: float,
    g_factor: float,
    beta2: float,
    g2_factor: float,
    *scratch: Array,
) -> None:
    """Update the mean `m` and the mean square `v` with the gradient `g`.

    The host computes in one scratch array of the shape of g; a fused kernel takes none.
    """
    m *= beta1
    m += xp.multiply(g, g_factor, *scratch)
    v *= beta2
    v += xp.multiply(xp.multiply(g, g, *scratch), g2_factor, *scratch)


def compute_direction(
    xp: Any,
    m: Array,
    v: Array,
    step_size: float,
    v_correction: float,
    epsilon: float,
    *scratch: Array,
) -> Array:
    """Return `step_size` m / (`v_correction` sqrt(v) + epsilon), in `scratch` if there is one."""
    t = xp.multiply(xp.sqrt(v, *scratch), v_correction, *scratch)
    t += epsilon
    return xp.multiply(xp.divide(m, t, *scratch), step_size, *scratch)
