"""Layer normalization: each vector by its own statistics, so without communication.

On a GPU forward and backward are CUDA kernels; see cuda/layer_norm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, namespace, narrowed, on_device, widened
from hpctrain.nn.cuda import layer_norm
from hpctrain.nn.layer import Key, Parameter, Shape, ones, rows_of, sum_rows, zeros


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
    ) -> tuple[Array, tuple[np.ndarray, np.ndarray] | layer_norm.RowNormalization]:
        if on_device(x):
            out, saved = layer_norm.normalize(rows_of(x), p["weight"], p["bias"], self.epsilon)
            return out.reshape(x.shape), saved
        x_wide = widened(x)
        x_hat = x_wide - x_wide.mean(axis=-1, keepdims=True)
        scale = _mean_product(x_hat, x_hat)
        scale += self.epsilon
        np.divide(1, np.sqrt(scale, out=scale), out=scale)
        x_hat *= scale
        y = x_hat * p["weight"]
        y += p["bias"]
        return narrowed(y, x), (x_hat, scale)

    def backward(
        self,
        p: Mapping[str, Array],
        g: Mapping[str, Array],
        saved: tuple[np.ndarray, np.ndarray] | layer_norm.RowNormalization,
        dy: Array,
        want_dx: bool,
    ) -> Array | None:
        if isinstance(saved, layer_norm.RowNormalization):
            flat = namespace(dy).ascontiguousarray(rows_of(dy))
            layer_norm.write_parameter_gradients(saved, flat, g["bias"], g["weight"])
            return (
                layer_norm.backward(saved, flat, p["weight"]).reshape(dy.shape) if want_dx else None
            )
        (x_hat, scale), dy_wide = saved, widened(dy)
        sum_rows(rows_of(dy_wide), out=g["bias"])
        product = dy_wide * x_hat
        sum_rows(rows_of(product), out=g["weight"])
        if not want_dx:
            return None
        dx = np.multiply(dy_wide, p["weight"], out=product)
        # Mean and variance are fixed by the normalization: remove the parts of dx that change them.
        variance_part = _mean_product(dx, x_hat)
        dx -= dx.mean(axis=-1, keepdims=True)
        dx -= x_hat * variance_part
        dx *= scale
        return narrowed(dx, dy)


def _mean_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the mean of a * b over the last axis, which is kept with length 1."""
    total: np.ndarray = np.einsum("...i,...i->...", a, b)[..., None]
    total /= a.shape[-1]
    return total
