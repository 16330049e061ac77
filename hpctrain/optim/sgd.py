"""Stochastic gradient descent with momentum: heavy ball (Polyak, 1964) or Nesterov's.

    h = c g + decay w                   c: the clipping factor, 1 without `clip_norm`
    v <- momentum v + h
    w <- w - rate v                     w <- w - rate (h + momentum v)       with nesterov

The rate is not a factor in v, so that a new rate applies to all of v at once; Goyal et al. (2017,
section 3) use the same form. Nesterov's method follows Sutskever et al. (2013) in the form of
Bengio et al. (2013): w is the look-ahead point, at which gradients are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hpctrain.core.config import options
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, fused, namespace, on_device
from hpctrain.optim.norms import clip_factor, find_decaying, kernel_slices
from hpctrain.optim.optimizer import (
    BLOCK_ELEMENTS,
    CommonOptions,
    Fraction,
    GatherRows,
    NonNegativeFloat,
    Optimizer,
    Schedule,
    State,
    TensorSlot,
    blocks,
    build,
    initial_state,
    rate_at,
)


@options
class SgdOptions(CommonOptions):
    """`[optimizer] kind = "sgd"`."""

    momentum: Fraction = 0.0
    nesterov: bool = False
    weight_decay: NonNegativeFloat = 0.0
    exempt_vectors: bool = False

    def __post_init__(self) -> None:
        """Raise UsageError for nesterov without momentum."""
        if self.nesterov and not self.momentum:
            raise UsageError("[optimizer] nesterov: expected a momentum above 0, seen 0")

    def build(self, rate: float | Schedule) -> Optimizer:
        """Return SGD whose rate is `rate`: a number, or a schedule built from `self.rate`."""
        init = partial(initial_state, names=["momentum"] if self.momentum else [])
        return Optimizer(init, partial(_update, self, rate), rate, self.clip_norm is not None)


def sgd(
    rate: float | Schedule,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    exempt_vectors: bool = False,
    clip_norm: float | None = None,
) -> Optimizer:
    """Return SGD; `rate` is a number or a function of the 0-based step.

    With `exempt_vectors` 1-d tensors, such as biases, do not decay. A gradient whose norm
    over all tensors is above `clip_norm` is scaled down to it. The state is "momentum", or empty
    for momentum 0. Raises UsageError unless 0 <= momentum < 1, momentum > 0 with nesterov,
    weight_decay >= 0 and clip_norm > 0.
    """
    return build(SgdOptions, "sgd", **locals())


def _update(
    const: SgdOptions,
    schedule: float | Schedule,
    grad: Array,
    state: State,
    param: Array,
    slots: Sequence[TensorSlot],
    gather_rows: GatherRows,
) -> None:
    rate = rate_at(schedule, int(state["step"][0]))
    clip = clip_factor(grad, const.clip_norm, slots, gather_rows)
    state["step"] += 1
    if on_device(param):
        return _update_on_device(const, rate, clip, grad, state, param, slots)
    decaying_slices = find_decaying(param.size, slots, const.exempt_vectors)
    # Allocated in each call: ranks that are threads would share a scratch kept between calls.
    xp = namespace(param)
    scratch = xp.empty(min(BLOCK_ELEMENTS, param.size), param.dtype)
    for block, decaying_parts in zip(blocks(param.size), decaying_slices, strict=True):
        g, w, t = grad[block], param[block], scratch[: block.stop - block.start]
        parts = decaying_parts if const.weight_decay else ()
        if const.momentum:
            v = state["momentum"][block]
            _update_momentum(xp, v, g, const.momentum, clip, t)
            for part in parts:
                x = param[part]
                _add_scaled(xp, state["momentum"][part], x, const.weight_decay, scratch[: x.size])
        if const.nesterov or not const.momentum:
            for part in parts:
                param[part] *= 1 - rate * const.weight_decay
            _add_scaled(xp, w, g, -rate * clip, t)
        if const.momentum:
            _add_scaled(xp, w, v, -rate * const.momentum if const.nesterov else -rate, t)


def _update_momentum(
    xp: Any, v: Array, g: Array, momentum: float, clip: float, *scratch: Array
) -> None:
    v *= momentum
    _add_scaled(xp, v, g, clip, *scratch)


def _add_scaled(xp: Any, y: Array, x: Array, factor: float, *scratch: Array) -> None:
    """Add `factor` times x to y: on the host in a scratch array, or inside a fused kernel."""
    y += x if scratch and factor == 1 else xp.multiply(x, factor, *scratch)


def _update_on_device(
    const: SgdOptions,
    rate: float,
    clip: float,
    grad: Array,
    state: State,
    param: Array,
    slots: Sequence[TensorSlot],
) -> None:
    per_slot = const.exempt_vectors and const.weight_decay > 0
    for elements, decays in kernel_slices(param.size, slots, per_slot):
        w, g, decay = param[elements], grad[elements], const.weight_decay * decays
        if not const.momentum:
            fused(_plain_kernel, w)(w, g, 1 - rate * decay, -rate * clip)
            continue
        arrays, factors = (w, state["momentum"][elements], g), (const.momentum, clip, decay)
        if const.nesterov:
            step_factors = (1 - rate * decay, -rate * clip, -rate * const.momentum)
            fused(_nesterov_kernel, w)(*arrays, *step_factors, *factors)
        else:
            fused(_heavy_ball_kernel, w)(*arrays, -rate, *factors)


def _plain_kernel(xp: Any, w: Array, g: Array, decay_factor: float, g_factor: float) -> None:
    w *= decay_factor
    _add_scaled(xp, w, g, g_factor)


def _heavy_ball_kernel(
    xp: Any, w: Array, v: Array, g: Array, v_factor: float, *factors: float
) -> None:
    momentum, clip, decay = factors
    _update_momentum(xp, v, g, momentum, clip)
    _add_scaled(xp, v, w, decay)
    _add_scaled(xp, w, v, v_factor)


def _nesterov_kernel(
    xp: Any,
    w: Array,
    v: Array,
    g: Array,
    decay_factor: float,
    g_factor: float,
    v_factor: float,
    *factors: float,
) -> None:
    momentum, clip, decay = factors
    _update_momentum(xp, v, g, momentum, clip)
    _add_scaled(xp, v, w, decay)
    _plain_kernel(xp, w, g, decay_factor, g_factor)
    _add_scaled(xp, w, v, v_factor)
