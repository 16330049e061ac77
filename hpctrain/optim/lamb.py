"""LAMB: Adam whose rate follows the size of each tensor (You et al., 2019, algorithm 2).

    m <- beta1 m + (1 - beta1) g            v <- beta2 v + (1 - beta2) g^2
    u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)  +  decay w
    w <- w - rate (|w| / |u|) u                          for each tensor; t counts from 1

phi, the paper's bound on |w|, is the identity. Tensors of one dim (biases, norms) take the plain
rate and do not decay unless `exempt_vectors` is off; so do, for the rate, tensors of zeros.
u would be an array of full length: it is computed twice, for its norm and for the update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hpctrain.config import options
from hpctrain.core.xp import Array, fused, namespace, on_device
from hpctrain.optim.adamw import check, direction, direction_in_kernel, follow, following, moments
from hpctrain.optim.norms import (
    BlockPiece,
    by_slot,
    clip_factor,
    is_vector,
    pieces,
    ratio,
    runs,
    squares,
    squares_of,
    wholes,
    workspace,
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
    blocks,
    rate_of,
    start,
)


class _LambConstants(NamedTuple):
    rate: float | Schedule
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    exempt_vectors: bool
    clip_norm: float | None


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
    check("lamb", beta1, beta2, epsilon, weight_decay, clip_norm)
    numbers = _LambConstants(rate, beta1, beta2, epsilon, weight_decay, exempt_vectors, clip_norm)
    return Optimizer(partial(start, names=["mean", "square"]), partial(_update, numbers), rate)


def _update(
    a: _LambConstants,
    grad: Array,
    state: State,
    param: Array,
    slots: Sequence[TensorSlot],
    total: Total,
) -> None:
    rate, clip = rate_of(a.rate, int(state["step"][0])), clip_factor(grad, a.clip_norm, total)
    if on_device(param):
        return _on_device(a, rate, clip, grad, state, param, slots, total)
    scratch = namespace(param).empty((2, min(BLOCK, param.size)), param.dtype)
    for s in blocks(param.size):
        m, v = state["mean"][s], state["square"][s]
        moments(m, v, grad[s], clip, a.beta1, a.beta2, scratch[0, : s.stop - s.start])
    ratios = _ratios(a, state, param, slots, total, scratch)
    for piece in pieces(param.size, slots):
        u = _scaled_direction(a, piece, state, param, slots, scratch)
        u *= rate * float(ratios[piece.slot])
        param[piece.at] -= u
    state["step"] += 1


def _ratios(
    a: _LambConstants,
    state: State,
    param: Array,
    slots: Sequence[TensorSlot],
    total: Total,
    scratch: Array,
) -> np.ndarray:
    """Return |w| / |u| of each slot, float64; 1 for those exempt."""
    wide, own = workspace(param), []
    for piece in pieces(param.size, slots):
        u = _scaled_direction(a, piece, state, param, slots, scratch)
        own.append((squares(param[piece.at], wide), squares(u, wide)))
    return _ratios_of(a, total(np.array(own).reshape(-1, 2)), slots)


def _ratios_of(a: _LambConstants, rows: np.ndarray, slots: Sequence[TensorSlot]) -> np.ndarray:
    w, u = np.sqrt(by_slot(rows, slots)).T
    exempt = [a.exempt_vectors and is_vector(slot) for slot in slots]
    return np.where(exempt, 1.0, ratio(w, u))


def _scaled_direction(
    a: _LambConstants,
    piece: BlockPiece,
    state: State,
    param: Array,
    slots: Sequence[TensorSlot],
    scratch: Array,
) -> Array:
    """Return u of one piece, in row 0 of `scratch`."""
    at, (u, t) = piece.at, scratch[:, : piece.at.stop - piece.at.start]
    updates = int(state["step"][0]) + 1
    step, grow = 1 / (1 - a.beta1**updates), 1 / math.sqrt(1 - a.beta2**updates)
    direction(state["mean"][at], state["square"][at], step, grow, a.epsilon, u)
    if a.weight_decay and not (a.exempt_vectors and is_vector(slots[piece.slot])):
        u += namespace(u).multiply(param[at], a.weight_decay, out=t)
    return u


def _on_device(
    a: _LambConstants,
    rate: float,
    clip: float,
    grad: Array,
    state: State,
    param: Array,
    slots: Sequence[TensorSlot],
    total: Total,
) -> None:
    """As `_update`, with memory for all of u: computed once, for its norm and for the update."""
    state["step"] += 1
    updates = int(state["step"][0])
    step, grow = 1 / (1 - a.beta1**updates), 1 / math.sqrt(1 - a.beta2**updates)
    u, numbers = namespace(param).zeros_like(param), following(clip, a.beta1, a.beta2)
    for s, decays in runs(param.size, slots, a.exempt_vectors):
        arrays = (u[s], param[s], state["mean"][s], state["square"][s], grad[s])
        fused(_lamb, param)(*arrays, *numbers, a.weight_decay * decays, step, grow, a.epsilon)
    rows = squares_of([param, u], [at for _, at in pieces(param.size, slots)])
    ratios = _ratios_of(a, total(rows), slots)
    for slot, at in wholes(param.size, slots):
        fused(_take, param)(param[at], u[at], rate * float(ratios[slot]))


def _lamb(
    xp: Any,
    u: Array,
    w: Array,
    m: Array,
    v: Array,
    g: Array,
    beta1: float,
    new1: float,
    beta2: float,
    new2: float,
    decay: float,
    step: float,
    grow: float,
    epsilon: float,
) -> None:
    follow(m, v, g, beta1, new1, beta2, new2)
    xp.add(direction_in_kernel(xp, m, v, step, grow, epsilon), w * decay, out=u)


def _take(xp: Any, w: Array, u: Array, rate: float) -> None:
    w -= u * rate


@options
class LambOptions(CommonOptions):
    """`[optimizer] kind = "lamb"`."""

    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    epsilon: Positive = 1e-6
    weight_decay: NotNegative = 0.01
    exempt_vectors: bool = True

    def build(self, schedule: Schedule) -> Optimizer:
        """Return the optimizer that follows `schedule`, which was made from `rate`."""
        return lamb(
            schedule,
            self.beta1,
            self.beta2,
            self.epsilon,
            self.weight_decay,
            self.exempt_vectors,
            self.clip_norm,
        )
