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

from hpctrain.config import options
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

    With `exempt_vectors` tensors of one dim, such as biases, do not decay. A gradient whose norm
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
    if on_device(param):
        beta_factors = moment_factors(clip, const.beta1, const.beta2)
        per_slot = const.exempt_vectors and const.weight_decay > 0
        for elements, decays in kernel_slices(param.size, slots, per_slot):
            decay_factor = 1 - rate * const.weight_decay * decays
            m, v = state["mean"][elements], state["square"][elements]
            arrays = (param[elements], m, v, grad[elements])
            factors = (*beta_factors, decay_factor, step_size, v_correction, const.epsilon)
            fused(_adamw_kernel, param)(*arrays, *factors)
        return
    scratch = namespace(param).empty(min(BLOCK_ELEMENTS, param.size), param.dtype)
    decaying_slices = find_decaying(param.size, slots, const.exempt_vectors)
    for block, decaying_parts in zip(blocks(param.size), decaying_slices, strict=True):
        m, v, t = state["mean"][block], state["square"][block], scratch[: block.stop - block.start]
        update_moments(m, v, grad[block], clip, const.beta1, const.beta2, t)
        for part in decaying_parts if const.weight_decay else ():
            param[part] *= 1 - rate * const.weight_decay
        write_direction(m, v, step_size, v_correction, const.epsilon, t)
        param[block] -= t


def _adamw_kernel(
    xp: Any,
    w: Array,
    m: Array,
    v: Array,
    g: Array,
    beta1: float,
    g_factor: float,
    beta2: float,
    g2_factor: float,
    decay_factor: float,
    step_size: float,
    v_correction: float,
    epsilon: float,
) -> None:
    update_moments_in_kernel(m, v, g, beta1, g_factor, beta2, g2_factor)
    w *= decay_factor
    w -= direction_in_kernel(xp, m, v, step_size, v_correction, epsilon)


def moment_factors(clip: float, beta1: float, beta2: float) -> tuple[float, float, float, float]:
    """Return the factors beta1, g_factor, beta2 and g2_factor of `update_moments_in_kernel`."""
    return beta1, clip * (1 - beta1), beta2, clip * clip * (1 - beta2)


def update_moments_in_kernel(
    m: Array, v: Array, g: Array, beta1: float, g_factor: float, beta2: float, g2_factor: float
) -> None:
    """Do the work of `update_moments` inside a fused kernel."""
    m *= beta1
    m += g * g_factor
    v *= beta2
    v += g * g * g2_factor


def direction_in_kernel(
    xp: Any, m: Array, v: Array, step_size: float, v_correction: float, epsilon: float
) -> Array:
    """Return the array that `write_direction` writes, inside a fused kernel."""
    return m / (xp.sqrt(v) * v_correction + epsilon) * step_size


def update_moments(
    m: Array, v: Array, g: Array, clip: float, beta1: float, beta2: float, t: Array
) -> None:
    """Update the mean `m` and the mean square `v` of `clip` times g, with scratch `t`."""
    xp = namespace(g)
    m *= beta1
    m += xp.multiply(g, clip * (1 - beta1), out=t)
    v *= beta2
    xp.multiply(g, g, out=t)
    t *= clip * clip * (1 - beta2)
    v += t


def write_direction(
    m: Array, v: Array, step_size: float, v_correction: float, epsilon: float, t: Array
) -> None:
    """Write `step_size` m / (`v_correction` sqrt(v) + epsilon) into `t`."""
    xp = namespace(m)
    xp.sqrt(v, out=t)
    t *= v_correction
    t += epsilon
    xp.divide(m, t, out=t)
    t *= step_size
