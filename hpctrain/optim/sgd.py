"""Stochastic gradient descent with momentum: heavy ball (Polyak, 1964) or Nesterov's.

    h = c g + decay w                   c: the clipping factor, 1 without `clip_norm`
    v <- momentum v + h
    w <- w - rate v                     w <- w - rate (h + momentum v)       with nesterov

The rate is not a factor in v, so that a new rate applies to all of v at once; Goyal et al. (2017,
section 3) use the same form. Nesterov's method follows Sutskever et al. (2013) in the form of
Bengio et al. (2013): w is the look-ahead point, at which gradients are computed.
"""

from __future__ import annotations

from typing import Any

from hpctrain.core.config import options
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array
from hpctrain.optim.optimizer import Fraction, NonNegativeFloat, Optimizer, Schedule
from hpctrain.optim.rule import CommonOptions, Parts, Step, assemble, build, decaying


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
        return assemble(self.run, rate, self.clip_norm, ["momentum"] if self.momentum else [])

    def run(self, step: Step) -> None:
        """Write the parameters and the momentum."""
        rate, clip = step.rate, step.clip
        exempt = self.exempt_vectors
        for elements, decay, parts in step.spans(self.weight_decay, exempt_vectors=exempt):
            g_step, momentum = (1 - rate * decay, -rate * clip), (self.momentum, clip, decay)
            if not self.momentum:
                step.apply(_plain_kernel, elements, parts, g_step)
            elif self.nesterov:
                numbers = (*g_step, -rate * self.momentum, *momentum)
                step.apply(_nesterov_kernel, elements, parts, numbers)
            else:
                step.apply(_heavy_ball_kernel, elements, parts, (-rate, *momentum))


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


def _plain_kernel(
    xp: Any,
    w: Array,
    g: Array,
    decay_factor: float,
    g_factor: float,
    *scratch: Array,
    parts: Parts | None = None,
) -> None:
    for (x,) in decaying(parts, w):
        x *= decay_factor
    _add_scaled(xp, w, g, g_factor, *scratch)


def _heavy_ball_kernel(
    xp: Any,
    w: Array,
    v: Array,
    g: Array,
    v_factor: float,
    momentum: float,
    clip: float,
    decay: float,
    *scratch: Array,
    parts: Parts | None = None,
) -> None:
    _update_momentum(xp, w, v, g, momentum, clip, decay, *scratch, parts=parts)
    _add_scaled(xp, w, v, v_factor, *scratch)


def _nesterov_kernel(
    xp: Any,
    w: Array,
    v: Array,
    g: Array,
    decay_factor: float,
    g_factor: float,
    v_factor: float,
    momentum: float,
    clip: float,
    decay: float,
    *scratch: Array,
    parts: Parts | None = None,
) -> None:
    _update_momentum(xp, w, v, g, momentum, clip, decay, *scratch, parts=parts)
    _plain_kernel(xp, w, g, decay_factor, g_factor, *scratch, parts=parts)
    _add_scaled(xp, w, v, v_factor, *scratch)


def _update_momentum(
    xp: Any,
    w: Array,
    v: Array,
    g: Array,
    momentum: float,
    clip: float,
    decay: float,
    *scratch: Array,
    parts: Parts | None,
) -> None:
    v *= momentum
    _add_scaled(xp, v, g, clip, *scratch)
    for x, y in decaying(parts, v, w):
        _add_scaled(xp, x, y, decay, *[t[: x.size] for t in scratch])


def _add_scaled(xp: Any, y: Array, x: Array, factor: float, *scratch: Array) -> None:
    """Add `factor` times x to y; a factor of 1 needs no product on the host."""
    y += x if scratch and factor == 1 else xp.multiply(x, factor, *scratch)
