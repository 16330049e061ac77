"""Layer normalization: each vector on its own, so nothing passes between samples or ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.errors import UsageError
from hpctrain.nn.layer import Key, Parameter, Shape, ones, rows_of, sum_rows, zeros
from hpctrain.xp import Array, namespace, narrow, on_device, wide


@dataclass(frozen=True)
class LayerNorm:
    """y = (x - mean) / sqrt(variance + epsilon) * weight + bias, over the last axis.

    Samples are (..., features); `weight` and `bias` are (features,). Source: Ba et al. (2016).
    """

    epsilon: float = 1e-5

    def output_shape(self, shape: Shape) -> Shape:
        if not shape:
            raise UsageError("expected samples (..., features), seen numbers")
        return shape

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        size = shape[-1:]
        weight, bias = (Parameter(size, init, wide=True) for init in (ones, zeros))
        return {"weight": weight, "bias": bias}

    def forward(
        self, p: Mapping[str, Array], x: Array, key: Key | None
    ) -> tuple[Array, tuple[Array, Array]]:
        xp, full = namespace(x), wide(x)
        normal = full - full.mean(axis=-1, keepdims=True)
        scale = _mean_product(normal, normal)
        scale += self.epsilon
        xp.divide(1, xp.sqrt(scale, out=scale), out=scale)
        normal *= scale
        y = normal * p["weight"]
        y += p["bias"]
        return narrow(y, x), (normal, scale)

    def backward(
        self,
        p: Mapping[str, Array],
        g: Mapping[str, Array],
        saved: tuple[Array, Array],
        dy: Array,
        want_dx: bool,
    ) -> Array | None:
        (normal, scale), given = saved, dy
        dy = wide(dy)
        sum_rows(rows_of(dy), out=g["bias"])
        product = dy * normal
        sum_rows(rows_of(product), out=g["weight"])
        if not want_dx:
            return None
        dx = namespace(dy).multiply(dy, p["weight"], out=product)
        # What would move the mean or the variance of a vector is taken out of its gradient.
        along = _mean_product(dx, normal)
        dx -= dx.mean(axis=-1, keepdims=True)
        dx -= normal * along
        dx *= scale
        return narrow(dx, given)


def _mean_product(a: Array, b: Array) -> Array:
    """Return the mean of a * b over the last axis, which stays with length 1."""
    if on_device(a):  # where einsum makes a matrix product of each vector
        return (a * b).mean(axis=-1, keepdims=True)
    total = namespace(a).einsum("...i,...i->...", a, b)[..., None]
    total /= a.shape[-1]
    return total
