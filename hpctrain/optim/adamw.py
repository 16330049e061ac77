"""Adam with decoupled weight decay (Loshchilov and Hutter, 2019, algorithm 2).

    m <- beta1 m + (1 - beta1) g            v <- beta2 v + (1 - beta2) g^2
    w <- (1 - rate decay) w  -  rate (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)

t counts from 1. As in most libraries the decay is multiplied by the rate, not by the schedule
alone. All parameters decay, biases too, unless `exempt_vectors` is set.
"""

from __future__ import annotations

import math
from typing import Any

from hpctrain.core.config import options
from hpctrain.core.xp import Array
from hpctrain.optim.optimizer import (
    Fraction,
    NonNegativeFloat,
    Optimizer,
    PositiveFloat,
    Schedule,
)
from hpctrain.optim.rule import CommonOptions, Parts, Step, assemble, build, decaying


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
        return assemble(self.run, rate, self.clip_norm, ["mean", "square"])

    def run(self, step: Step) -> None:
        """Write the parameters and both moments."""
        numbers = (*self.moment_factors(step), *self.direction_factors(step, step.rate))
        exempt = self.exempt_vectors
        for elements, decay, parts in step.spans(self.weight_decay, exempt_vectors=exempt):
            step.apply(_adamw_kernel, elements, parts, (1 - step.rate * decay, *numbers))

    def moment_factors(self, step: Step) -> tuple[float, float, float, float]:
        """Return the four factors of `update_moments`, for a gradient that is scaled."""
        clip = step.clip
        return self.beta1, clip * (1 - self.beta1), self.beta2, clip * clip * (1 - self.beta2)

    def direction_factors(self, step: Step, rate: float) -> tuple[float, float, float]:
        """Return the three factors of `compute_direction`, which is multiplied by `rate`.

        The bias corrections are scalars: as part of other factors they need no pass over memory.
        """
        m_correction, v_correction = 1 - self.beta1**step.number, 1 - self.beta2**step.number
        return rate / m_correction, 1 / math.sqrt(v_correction), self.epsilon


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


def _adamw_kernel(
    xp: Any,
    w: Array,
    m: Array,
    v: Array,
    g: Array,
    decay_factor: float,
    beta1: float,
    g_factor: float,
    beta2: float,
    g2_factor: float,
    step_size: float,
    v_correction: float,
    epsilon: float,
    *scratch: Array,
    parts: Parts | None = None,
) -> None:
    update_moments(xp, m, v, g, beta1, g_factor, beta2, g2_factor, *scratch)
    for (x,) in decaying(parts, w):
        x *= decay_factor
    w -= compute_direction(xp, m, v, step_size, v_correction, epsilon, *scratch)


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
