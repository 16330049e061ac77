"""Layers without arithmetic: they change the shape of samples, or select some of the values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, namespace
from hpctrain.nn.layer import Key, PlainLayer, Shape, require_at_least


@dataclass(frozen=True)
class Flatten(PlainLayer):
    """Turn samples of any shape into vectors: (n, ...) -> (n, features)."""

    def output_shape(self, shape: Shape) -> Shape:
        return (math.prod(shape),)

    def forward(self, p: Mapping[str, Array], x: Array, key: Key | None) -> tuple[Array, Shape]:
        # NumPy cannot infer a size given as -1 for a share without samples.
        return x.reshape(len(x), math.prod(x.shape[1:])), x.shape

    def backward(
        self, p: Mapping[str, Array], g: Mapping[str, Array], saved: Shape, dy: Array, want_dx: bool
    ) -> Array | None:
        return dy.reshape(saved)


@dataclass(frozen=True)
class AddChannel(PlainLayer):
    """Add a channel dim to grey images: (n, h, w) -> (n, h, w, 1).

    Raises UsageError if samples are not (h, w).
    """

    def output_shape(self, shape: Shape) -> Shape:
        if len(shape) != 2:
            raise UsageError(f"expected grey images (h, w), seen {shape}")
        return (*shape, 1)

    def forward(self, p: Mapping[str, Array], x: Array, key: Key | None) -> tuple[Array, None]:
        return x[..., None], None

    def backward(
        self, p: Mapping[str, Array], g: Mapping[str, Array], saved: None, dy: Array, want_dx: bool
    ) -> Array | None:
        return dy[..., 0]


@dataclass(frozen=True)
class Subsample(PlainLayer):
    """Take every `stride`-th pixel and add channels of zeros, up to `channels`.

    (n, h, w, c) -> (n, oh, ow, channels) with oh = ceil(h / stride). The shortcut without
    parameters of He et al. (2015), option A. Raises UsageError if samples are not (h, w, c) or
    have more than `channels`.
    """

    stride: int
    channels: int

    def __post_init__(self) -> None:
        require_at_least(self, stride=(self.stride, 1), channels=(self.channels, 1))

    def output_shape(self, shape: Shape) -> Shape:
        if len(shape) != 3 or shape[2] > self.channels:
            raise UsageError(
                f"expected images (h, w, at most {self.channels} channels), seen {shape}"
            )
        return (-(-shape[0] // self.stride), -(-shape[1] // self.stride), self.channels)

    def forward(self, p: Mapping[str, Array], x: Array, key: Key | None) -> tuple[Array, Shape]:
        y = namespace(x).zeros((len(x), *self.output_shape(x.shape[1:])), x.dtype)
        y[..., : x.shape[3]] = x[:, :: self.stride, :: self.stride]
        return y, x.shape

    def backward(
        self, p: Mapping[str, Array], g: Mapping[str, Array], saved: Shape, dy: Array, want_dx: bool
    ) -> Array | None:
        dx = namespace(dy).zeros(saved, dy.dtype)
        dx[:, :: self.stride, :: self.stride] = dy[..., : saved[3]]
        return dx
