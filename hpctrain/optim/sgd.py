"""Stochastic gradient descent with momentum: heavy ball (Polyak, 1964) or Nesterov's.

    h = c g + decay w                   c: the clipping factor, 1 without `clip_norm`
    v <- momentum v + h
    w <- w - rate v                     w <- w - rate (h + momentum v)       with nesterov

The rate stands outside v, so that a changing rate acts at once on all of v; the form in which
Goyal et al. (2017, section 3) state their rules. Nesterov's method is that of Sutskever et al.
(2013) as Bengio et al. (2013) write it: w is the point ahead, at which gradients are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from hpctrain.config import options
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, fused, namespace, on_device
from hpctrain.optim.norms import clip_factor, decayed, runs
from hpctrain.optim.optimizer import (
    BLOCK,
    CommonOptions,
    Fraction,
    NotNegative,
    Optimizer,
    Schedule,
    State,
    TensorSlot,
    Total,
    blocks,
    rate_of,
    require,
    start,
)


class _SgdConstants(NamedTuple):
    rate: float | Schedule
    momentum: float
    nesterov: bool
    weight_decay: float
    exempt_vectors: bool
    clip_norm: float | None


def sgd(
    rate: float | Schedule,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    exempt_vectors: bool = False,
    clip_norm: float | None = None,
) -> Optimizer:
    """Return SGD; `rate` is a number or a function of the 0-based step.

    With `exempt_vectors` tensors of one dim, such as biases, do not decay; gradients whose norm,
    all together, is beyond `clip_norm` count as if scaled down to it. The state is "momentum"
    (none for momentum 0). Raises UsageError unless 0 <= momentum < 1, nesterov has a momentum,
    weight_decay >= 0 and clip_norm > 0.
    """
    require("sgd", "in [0, 1)", momentum=momentum)
    require("sgd", "at least 0", weight_decay=weight_decay)
    require("sgd", "above 0", clip_norm=clip_norm)
    if nesterov and not momentum:
        raise UsageError("sgd: nesterov needs a momentum above 0, seen 0")
    numbers = _SgdConstants(rate, momentum, nesterov, weight_decay, exempt_vectors, clip_norm)
    names = ["momentum"] if momentum else []
    return Optimizer(
        partial(start, names=names), partial(_update, numbers), rate, clip_norm is not None
    )


def _update(
    a: _SgdConstants,
    grad: Array,
    state: State,
    param: Array,
    slots: Sequence[TensorSlot],
    total: Total,
) -> None:
    rate, clip = rate_of(a.rate, int(state["step"][0])), clip_factor(grad, a.clip_norm, total)
    state["step"] += 1
    if on_device(param):
        return _on_device(a, rate, clip, grad, state, param, slots)
    parts = decayed(param.size, slots, a.exempt_vectors)
    # Made anew each time: held over, it would be shared by ranks that are threads.
    scratch = namespace(param).empty(min(BLOCK, param.size), param.dtype)
    for s, decays in zip(blocks(param.size), parts, strict=True):
        g, w, t = grad[s], param[s], scratch[: s.stop - s.start]
        if a.momentum:
            v = state["momentum"][s]
            v *= a.momentum
            _add(v, g, clip, t)
            for p in decays if a.weight_decay else ():
                _add(state["momentum"][p], param[p], a.weight_decay, scratch)
        if a.nesterov or not a.momentum:
            for p in decays if a.weight_decay else ():
                param[p] *= 1 - rate * a.weight_decay
            _add(w, g, -rate * clip, t)
        if a.momentum:
            _add(w, v, -rate * a.momentum if a.nesterov else -rate, t)


def _add(y: Array, x: Array, factor: float, t: Array) -> None:
    """Add `factor` times x to y, with scratch `t`, which may be longer."""
    y += x if factor == 1 else namespace(x).multiply(x, factor, out=t[: x.size])


def _on_device(
    a: _SgdConstants,
    rate: float,
    clip: float,
    grad: Array,
    state: State,
    param: Array,
    slots: Sequence[TensorSlot],
) -> None:
    for s, decays in runs(param.size, slots, a.exempt_vectors and a.weight_decay > 0):
        w, g, decay = param[s], grad[s], a.weight_decay * decays
        if not a.momentum:
            fused(_plain, w)(w, g, 1 - rate * decay, rate * clip)
            continue
        arrays, numbers = (w, state["momentum"][s], g), (a.momentum, clip, decay)
        if a.nesterov:
            ahead = (1 - rate * decay, rate * clip, rate * a.momentum)
            fused(_nesterov, w)(*arrays, *numbers, *ahead)
        else:
            fused(_heavy_ball, w)(*arrays, *numbers, rate)


def _plain(xp: Any, w: Array, g: Array, keep: float, rate: float) -> None:
    w *= keep
    w -= g * rate


def _heavy_ball(
    xp: Any, w: Array, v: Array, g: Array, momentum: float, clip: float, decay: float, rate: float
) -> None:
    v *= momentum
    v += g * clip
    v += w * decay
    w -= v * rate


def _nesterov(
    xp: Any,
    w: Array,
    v: Array,
    g: Array,
    momentum: float,
    clip: float,
    decay: float,
    keep: float,
    of_gradient: float,
    of_momentum: float,
) -> None:
    v *= momentum
    v += g * clip
    v += w * decay
    w *= keep
    w -= g * of_gradient
    w -= v * of_momentum


@options
class SgdOptions(CommonOptions):
    """`[optimizer] kind = "sgd"`."""

    momentum: Fraction = 0.0
    nesterov: bool = False
    weight_decay: NotNegative = 0.0
    exempt_vectors: bool = False

    def build(self, schedule: Schedule) -> Optimizer:
        """Return the optimizer that follows `schedule`, which was made from `rate`."""
        return sgd(
            schedule,
            self.momentum,
            self.nesterov,
            self.weight_decay,
            self.exempt_vectors,
            self.clip_norm,
        )
