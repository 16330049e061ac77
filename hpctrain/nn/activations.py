"""Activations: elementwise functions without parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import pi, sqrt
from typing import Any

from hpctrain.core.xp import Array, fused, namespace, narrowed, on_device, widened
from hpctrain.nn.layer import Key, PlainLayer

BLOCK_ELEMENTS = 32_768  #: elements handled at once on the host: all temporaries stay in the cache
GELU_SCALE, GELU_CUBIC = sqrt(2 / pi), 0.044715


@dataclass(frozen=True)
class ReLU(PlainLayer):
    """y = max(x, 0) for samples in any shape; a NaN stays NaN, so that the loss shows it."""

    def forward(self, p: Mapping[str, Array], x: Array, key: Key | None) -> tuple[Array, Array]:
        y = namespace(x).maximum(x, 0)
        return y, y

    def backward(
        self, p: Mapping[str, Array], g: Mapping[str, Array], saved: Array, dy: Array, want_dx: bool
    ) -> Array | None:
        return dy * (saved > 0)


@dataclass(frozen=True)
class GELU(PlainLayer):
    """y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), for samples of any shape.

    This approximation differs by less than 5e-4 from the exact GELU, whose erf NumPy does not have.
    Source: Hendrycks and Gimpel (2016).
    """

    def forward(
        self, p: Mapping[str, Array], x: Array, key: Key | None
    ) -> tuple[Array, Array | None]:
        xp, flat = namespace(x), widened(x.reshape(-1))
        y, slope = xp.empty_like(flat), None if key is None else xp.empty_like(flat)
        kernel, step = fused(_gelu, x), max(flat.size, 1) if on_device(x) else BLOCK_ELEMENTS
        for i in range(0, flat.size, step):
            block = slice(i, i + step)
            kernel(flat[block], y[block], None if slope is None else slope[block])
        slope = None if slope is None else narrowed(slope, x)
        return narrowed(y, x).reshape(x.shape), slope

    def backward(
        self, p: Mapping[str, Array], g: Mapping[str, Array], saved: Array, dy: Array, want_dx: bool
    ) -> Array | None:
        return dy * saved.reshape(dy.shape)


def _gelu(xp: Any, x: Array, y: Array, slope: Array | None) -> None:
    """Write y and, from the same tanh, dy/dx: the only array that backward needs."""
    square = x * x
    t = square * (GELU_SCALE * GELU_CUBIC)
    t += GELU_SCALE
    t *= x
    xp.tanh(t, out=t)
    half = x * 0.5
    xp.multiply(half, t, out=y)
    y += half
    if slope is not None:
        # dy/dx = (1 + t)/2 + x/2 (1 - t^2) GELU_SCALE (1 + 3 GELU_CUBIC x^2)
        square *= 3 * GELU_SCALE * GELU_CUBIC
        square += GELU_SCALE
        square *= half
        xp.multiply(t, t, out=half)
        xp.subtract(1, half, out=half)
        square *= half
        t += 1
        t *= 0.5
        xp.add(square, t, out=slope)
