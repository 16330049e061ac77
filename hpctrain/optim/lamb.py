"""LAMB: Adam whose rate is scaled by the norm of each tensor (You et al., 2019, algorithm 2).

    m <- beta1 m + (1 - beta1) g            v <- beta2 v + (1 - beta2) g^2
    u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)  +  decay w
    w <- w - rate (|w| / |u|) u                          for each tensor; t counts from 1

phi, the paper's bound on |w|, is the identity here. Unless `exempt_vectors` is off, 1-d tensors
(biases, norms) use the plain rate and do not decay. Tensors of zeros also use the plain rate.
On the host u is computed twice, for its norm and for the update: it would be an array of full
length.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctrain.core.config import options
from hpctrain.core.xp import Array, fused, namespace, on_device
from hpctrain.optim.adamw import AdamWOptions, compute_direction, update_moments
from hpctrain.optim.norms import (
    is_vector,
    make_scratch,
    piece_ranges,
    safe_ratio,
    sum_by_slot,
    sum_squares,
    sum_squares_by_piece,
)
from hpctrain.optim.optimizer import Optimizer, PositiveFloat, Schedule
from hpctrain.optim.rule import Step, assemble, build


@options
class LambOptions(AdamWOptions):
    """`[optimizer] kind = "lamb"`."""

    epsilon: PositiveFloat = 1e-6
    exempt_vectors: bool = True

    def build(self, rate: float | Schedule) -> Optimizer:
        """Return LAMB whose rate is `rate`: a number, or a schedule built from `self.rate`."""
        return assemble(self.run, rate, self.clip_norm, ["mean", "square"], needs_norms=True)

    def run(self, step: Step) -> None:
        """Write the parameters and both moments."""
        if on_device(step.arrays[0]):
            return self._run_on_device(step)
        (t,), wide_scratch, rows = step.scratch, make_scratch(step.arrays[0]), []
        moments, direction = self.moment_factors(step), self.direction_factors(step, 1.0)
        u_scratch = np.empty_like(t)
        pieces = [(i, [x[elements] for x in step.arrays]) for i, elements in step.pieces()]

        def compute_u(slot: int, w: Array, m: Array, v: Array) -> Array:
            is_exempt = self.exempt_vectors and is_vector(step.slots[slot])
            decay = 0.0 if is_exempt else self.weight_decay
            return _compute_u(np, w, m, v, decay, *direction, u_scratch[: w.size], t[: w.size])

        for slot, (w, m, v, g) in pieces:
            update_moments(np, m, v, g, *moments, t[: w.size])
            u = compute_u(slot, w, m, v)
            rows.append((sum_squares(w, wide_scratch), sum_squares(u, wide_scratch)))
        rates = self._compute_rates(step, np.array(rows).reshape(-1, 2))
        for slot, (w, m, v, _) in pieces:
            u = compute_u(slot, w, m, v)
            _step_kernel(np, w, u, rates[slot], u)

    def _run_on_device(self, step: Step) -> None:
        """Compute u once, as an array."""
        param = step.arrays[0]
        u = namespace(param).zeros_like(param)
        numbers = (*self.moment_factors(step), *self.direction_factors(step, 1.0))
        with_u = step._replace(arrays=[u, *step.arrays])
        exempt = self.exempt_vectors
        for elements, decay, parts in step.spans(self.weight_decay, exempt_vectors=exempt):
            with_u.apply(_lamb_kernel, elements, parts, (decay, *numbers))
        _, ranges = piece_ranges(param.size, step.slots)
        rates = self._compute_rates(step, sum_squares_by_piece([param, u], ranges))
        for slot, elements in step.pieces():
            fused(_step_kernel, param)(param[elements], u[elements], rates[slot])

    def _compute_rates(self, step: Step, rows: np.ndarray) -> list[float]:
        """Return the rate of each slot: times |w| / |u|, but for exempt slots."""
        w, u = np.sqrt(sum_by_slot(step.gather_rows(rows), step.slots)).T
        is_exempt = [self.exempt_vectors and is_vector(slot) for slot in step.slots]
        ratios = np.where(is_exempt, 1.0, safe_ratio(w, u))
        return [step.rate * ratio for ratio in ratios.tolist()]


def lamb(
    rate: float | Schedule,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-6,
    weight_decay: float = 0.01,
    exempt_vectors: bool = True,
    clip_norm: float | None = None,
) -> Optimizer:
    """Return LAMB; `rate` is a number or a function of the 0-based step.

    The state is "mean" and "square". Raises UsageError unless 0 <= beta1, beta2 < 1, epsilon > 0,
    weight_decay >= 0 and clip_norm > 0.
    """
    return build(LambOptions, "lamb", **locals())


def _lamb_kernel(
    xp: Any,
    u: Array,
    w: Array,
    m: Array,
    v: Array,
    g: Array,
    decay: float,
    beta1: float,
    g_factor: float,
    beta2: float,
    g2_factor: float,
    *direction: float,
) -> None:
    update_moments(xp, m, v, g, beta1, g_factor, beta2, g2_factor)
    u[...] = _compute_u(xp, w, m, v, decay, *direction)


def _compute_u(
    xp: Any,
    w: Array,
    m: Array,
    v: Array,
    decay: float,
    m_factor: float,
    v_factor: float,
    epsilon: float,
    *scratch: Array,
) -> Array:
    """Return u; the host computes it in the first of two scratch arrays, and returns that."""
    u = compute_direction(xp, m, v, m_factor, v_factor, epsilon, *scratch[:1])
    if not scratch or decay:
        u += xp.multiply(w, decay, *scratch[1:])
    return u


def _step_kernel(xp: Any, w: Array, u: Array, rate: float, *scratch: Array) -> None:
    w -= xp.multiply(u, rate, *scratch)
