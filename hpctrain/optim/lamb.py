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

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from hpctrain.core.config import options
from hpctrain.core.xp import Array, fused, namespace, on_device
from hpctrain.optim.adamw import (
    AdamWOptions,
    compute_direction,
    moment_factors,
    update_moments,
)
from hpctrain.optim.norms import (
    BlockPiece,
    clip_factor,
    is_vector,
    kernel_slices,
    make_scratch,
    piece_ranges,
    pieces,
    safe_ratio,
    slot_pieces,
    sum_by_slot,
    sum_squares,
    sum_squares_by_piece,
)
from hpctrain.optim.optimizer import (
    BLOCK_ELEMENTS,
    GatherRows,
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
class LambOptions(AdamWOptions):
    """`[optimizer] kind = "lamb"`."""

    epsilon: PositiveFloat = 1e-6
    exempt_vectors: bool = True

    def build(self, rate: float | Schedule) -> Optimizer:
        """Return LAMB whose rate is `rate`: a number, or a schedule built from `self.rate`."""
        init = partial(initial_state, names=["mean", "square"])
        return Optimizer(init, partial(_update, self, rate), rate)


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


def _update(
    const: LambOptions,
    schedule: float | Schedule,
    grad: Array,
    state: State,
    param: Array,
    slots: Sequence[TensorSlot],
    gather_rows: GatherRows,
) -> None:
    rate = rate_at(schedule, int(state["step"][0]))
    clip = clip_factor(grad, const.clip_norm, slots, gather_rows)
    if on_device(param):
        return _update_on_device(const, rate, clip, grad, state, param, slots, gather_rows)
    xp, moments = namespace(param), moment_factors(clip, const.beta1, const.beta2)
    scratch = xp.empty((2, min(BLOCK_ELEMENTS, param.size)), param.dtype)
    for block in blocks(param.size):
        m, v = state["mean"][block], state["square"][block]
        update_moments(xp, m, v, grad[block], *moments, scratch[0, : m.size])
    ratios = _compute_ratios(const, state, param, slots, gather_rows, scratch)
    for piece in pieces(param.size, slots):
        u = _compute_u(const, piece, state, param, slots, scratch)
        u *= rate * float(ratios[piece.slot])
        param[piece.elements] -= u
    state["step"] += 1


def _compute_ratios(
    const: LambOptions,
    state: State,
    param: Array,
    slots: Sequence[TensorSlot],
    gather_rows: GatherRows,
    scratch: Array,
) -> np.ndarray:
    """Return |w| / |u| of each slot, float64; 1 for exempt slots."""
    wide_scratch, rows = make_scratch(param), []
    for piece in pieces(param.size, slots):
        u = _compute_u(const, piece, state, param, slots, scratch)
        w = param[piece.elements]
        rows.append((sum_squares(w, wide_scratch), sum_squares(u, wide_scratch)))
    return _ratios_from(const, gather_rows(np.array(rows).reshape(-1, 2)), slots)


def _ratios_from(const: LambOptions, rows: np.ndarray, slots: Sequence[TensorSlot]) -> np.ndarray:
    w, u = np.sqrt(sum_by_slot(rows, slots)).T
    is_exempt = [const.exempt_vectors and is_vector(slot) for slot in slots]
    return np.where(is_exempt, 1.0, safe_ratio(w, u))


def _compute_u(
    const: LambOptions,
    piece: BlockPiece,
    state: State,
    param: Array,
    slots: Sequence[TensorSlot],
    scratch: Array,
) -> Array:
    """Write u of a piece into row 0 of `scratch`, and return it."""
    elements, (u, t) = piece.elements, scratch[:, : piece.elements.stop - piece.elements.start]
    m, v, xp = state["mean"][elements], state["square"][elements], namespace(u)
    compute_direction(xp, m, v, *_direction_factors(const, int(state["step"][0]) + 1), u)
    if const.weight_decay and not (const.exempt_vectors and is_vector(slots[piece.slot])):
        u += xp.multiply(param[elements], const.weight_decay, out=t)
    return u


def _direction_factors(const: LambOptions, updates: int) -> tuple[float, float, float]:
    """Return the factors of `compute_direction` after `updates` updates; the rate comes later."""
    bias_corrections = 1 / (1 - const.beta1**updates), 1 / math.sqrt(1 - const.beta2**updates)
    return *bias_corrections, const.epsilon


def _update_on_device(
    const: LambOptions,
    rate: float,
    clip: float,
    grad: Array,
    state: State,
    param: Array,
    slots: Sequence[TensorSlot],
    gather_rows: GatherRows,
) -> None:
    """Do the work of `_update` on a device, where u is an array and computed once."""
    state["step"] += 1
    direction = _direction_factors(const, int(state["step"][0]))
    u = namespace(param).zeros_like(param)
    moments = moment_factors(clip, const.beta1, const.beta2)
    for elements, decays in kernel_slices(param.size, slots, const.exempt_vectors):
        m, v = state["mean"][elements], state["square"][elements]
        arrays = (u[elements], param[elements], m, v, grad[elements])
        fused(_lamb_kernel, param)(*arrays, const.weight_decay * decays, *moments, *direction)
    _, ranges = piece_ranges(param.size, slots)
    rows = sum_squares_by_piece([param, u], ranges)
    ratios = _ratios_from(const, gather_rows(rows), slots)
    for slot, elements in slot_pieces(param.size, slots):
        fused(_step_kernel, param)(param[elements], u[elements], rate * float(ratios[slot]))


def _lamb_kernel(
    xp: Any, u: Array, w: Array, m: Array, v: Array, g: Array, decay: float, *factors: float
) -> None:
    update_moments(xp, m, v, g, *factors[:4])
    xp.add(compute_direction(xp, m, v, *factors[4:]), w * decay, out=u)


def _step_kernel(xp: Any, w: Array, u: Array, rate: float) -> None:
    w -= u * rate
