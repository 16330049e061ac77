"""Layers that only look at the same numbers in another shape; they copy nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.errors import UsageError
from hpctrain.nn.layer import Key, Parameter, Shape
from hpctrain.xp import Array


@dataclass(frozen=True)
class Flatten:
    """Turn samples of any shape into vectors: (n, ...) -> (n, features)."""

    def output_shape(self, shape: Shape) -> Shape:
        return (math.prod(shape),)

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        return {}

    def forward(self, p: Mapping[str, Array], x: Array, key: Key | None) -> tuple[Array, Shape]:
        # The size is spelled out: -1 has no answer for a share of no samples.
        return x.reshape(len(x), math.prod(x.shape[1:])), x.shape

    def backward(
        self, p: Mapping[str, Array], g: Mapping[str, Array], saved: Shape, dy: Array, want_dx: bool
    ) -> Array | None:
        return dy.reshape(saved)


@dataclass(frozen=True)
class AddChannel:
    """Give grey images their one channel: (n, h, w) -> (n, h, w, 1).

    Raises UsageError if samples are not (h, w).
    """

    def output_shape(self, shape: Shape) -> Shape:
        if len(shape) != 2:
            raise UsageError(f"expected grey images (h, w), seen {shape}")
        return (*shape, 1)

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        return {}

    def forward(self, p: Mapping[str, Array], x: Array, key: Key | None) -> tuple[Array, None]:
        return x[..., None], None

    def backward(
        self, p: Mapping[str, Array], g: Mapping[str, Array], saved: None, dy: Array, want_dx: bool
    ) -> Array | None:
        return dy[..., 0]
