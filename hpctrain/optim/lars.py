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

from typing import Any

import numpy as np

from hpctrain.core.config import options
from hpctrain.core.xp import Array
from hpctrain.optim.norms import (
    is_vector,
    piece_ranges,
    safe_ratio,
    sum_by_slot,
    sum_squares_by_piece,
)
from hpctrain.optim.optimizer import (
    Fraction,
    NonNegativeFloat,
    Optimizer,
    PositiveFloat,
    Schedule,
)
from hpctrain.optim.rule import CommonOptions, Parts, Step, assemble, build, decaying


@options
class LarsOptions(CommonOptions):
    """`[optimizer] kind = "lars"`."""

    momentum: Fraction = 0.9
    weight_decay: NonNegativeFloat = 0.0
    trust: PositiveFloat = 0.001
    exempt_vectors: bool = True

    def build(self, rate: float | Schedule) -> Optimizer:
        """Return LARS whose rate is `rate`: a number, or a schedule built from `self.rate`."""
        return assemble(self.run, rate, self.clip_norm, ["momentum"], needs_norms=True)

    def run(self, step: Step) -> None:
        """Write the parameters and the momentum."""
        param, _, grad = step.arrays
        _, ranges = piece_ranges(param.size, step.slots)
        rows = step.gather_rows(sum_squares_by_piece([param, grad], ranges))
        w_norms, g_norms = np.sqrt(sum_by_slot(rows, step.slots)).T
        divisors = step.clip * g_norms + self.weight_decay * w_norms
        trust_ratios = safe_ratio(self.trust * w_norms, divisors)  # l of each slot, float64
        for i, elements in step.pieces():
            is_exempt = self.exempt_vectors and is_vector(step.slots[i])
            rate = step.rate if is_exempt else step.rate * float(trust_ratios[i])
            decay = 0.0 if is_exempt else rate * self.weight_decay
            numbers = (self.momentum, rate * step.clip, decay)
            step.apply(_lars_kernel, elements, None if decay else (), numbers)


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


def _lars_kernel(
    xp: Any,
    w: Array,
    v: Array,
    g: Array,
    momentum: float,
    rate: float,
    decay: float,
    *scratch: Array,
    parts: Parts | None = None,
) -> None:
    v *= momentum
    v += xp.multiply(g, rate, *scratch)
    for x, y in decaying(parts, v, w):
        x += xp.multiply(y, decay, *scratch)
    w -= v
