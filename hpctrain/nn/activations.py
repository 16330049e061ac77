"""Activations: functions of single elements, without parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.nn.layer import Key, Parameter, Shape
from hpctrain.xp import Array, namespace


@dataclass(frozen=True)
class ReLU:
    """y = max(x, 0) for samples of any shape; not-a-number stays so, and the loss shows it."""

    def output_shape(self, shape: Shape) -> Shape:
        return shape

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        return {}

    def forward(self, p: Mapping[str, Array], x: Array, key: Key | None) -> tuple[Array, Array]:
        y = namespace(x).maximum(x, 0)
        return y, y

    def backward(
        self, p: Mapping[str, Array], g: Mapping[str, Array], saved: Array, dy: Array, want_dx: bool
    ) -> Array | None:
        return dy * (saved > 0)
