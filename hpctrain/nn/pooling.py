"""Pooling: one number for each window of an image, or for the whole image; channels last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, namespace, narrowed, widened
from hpctrain.nn.conv import count_windows, window_pixels
from hpctrain.nn.layer import Key, PlainLayer, Shape, require_at_least


@dataclass(frozen=True)
class MaxPool2d(PlainLayer):
    """Keep the largest value of each window: (n, h, w, c) -> (n, oh, ow, c).

    oh = (h - window) // stride + 1; rows and columns that fill no window are ignored. Of several
    equal maxima the first gets the gradient. Raises UsageError if samples are not (h, w, c) or are
    smaller than the window.
    """

    window: int = 2
    stride: int = 2

    def __post_init__(self) -> None:
        require_at_least(self, window=(self.window, 1), stride=(self.stride, 1))

    def output_shape(self, shape: Shape) -> Shape:
        return (*count_windows(shape, self.window, self.stride), shape[2])

    def forward(
        self, p: Mapping[str, Array], x: Array, key: Key | None
    ) -> tuple[Array, tuple[Array, Array]]:
        first_index, *other_indices = (index for _, _, index in self._window_pixels(x))
        y = x[first_index].copy()
        for index in other_indices:
            namespace(x).maximum(y, x[index], out=y)
        return y, (x, y)

    def backward(
        self,
        p: Mapping[str, Array],
        g: Mapping[str, Array],
        saved: tuple[Array, Array],
        dy: Array,
        want_dx: bool,
    ) -> Array | None:
        x, y = saved
        dx = namespace(x).zeros(x.shape, x.dtype)
        is_unassigned = namespace(x).ones(y.shape, bool)
        # All values of a window may be equal, such as 0 after a ReLU: only one gets the gradient.
        for _, _, index in self._window_pixels(x):
            is_max = (x[index] == y) & is_unassigned
            is_unassigned ^= is_max
            dx[index] += dy * is_max
        return dx

    def _window_pixels(self, x: Array) -> list[tuple[int, int, tuple[slice, ...]]]:
        oh, ow, _ = self.output_shape(x.shape[1:])
        return list(window_pixels(self.window, self.stride, oh, ow))


@dataclass(frozen=True)
class MeanPool(PlainLayer):
    """The mean of each channel over the whole image: (n, h, w, c) -> (n, c)."""

    def output_shape(self, shape: Shape) -> Shape:
        if len(shape) != 3:
            raise UsageError(f"expected images (height, width, channels), seen {shape}")
        return shape[2:]

    def forward(self, p: Mapping[str, Array], x: Array, key: Key | None) -> tuple[Array, Shape]:
        return narrowed(widened(x).mean(axis=(1, 2)), x), x.shape

    def backward(
        self, p: Mapping[str, Array], g: Mapping[str, Array], saved: Shape, dy: Array, want_dx: bool
    ) -> Array | None:
        n, h, w, c = saved
        dx = namespace(dy).empty(saved, dy.dtype)
        dx[...] = (dy / (h * w)).reshape(n, 1, 1, c)
        return dx
