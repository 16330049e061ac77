"""Convolution as one matrix product (im2col; Chellapilla et al., 2006), channels last.

Each window of the image is copied to a row, and the kernel is used as a matrix:

    x (n, h, w, c)  --copy-->  columns (n * oh * ow, kernel * kernel * c)
                               @ weight (kernel * kernel * c, outputs)  ->  y (n, oh, ow, outputs)

With channels last, a row of a window is contiguous in memory, y leaves the product in its final
order, and neither forward nor backward transposes an array. The price: `columns` is
kernel^2 / stride^2 times as large as x, and is saved for backward. On a GPU one kernel gathers the
columns, and another sums their gradient into dx; see cuda/im2col.py.

Pooling has one number for each window of an image, or for the whole image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, namespace, narrowed, on_device, widened
from hpctrain.nn.cuda import im2col
from hpctrain.nn.layer import (
    Key,
    Later,
    Parameter,
    PlainLayer,
    Shape,
    he_normal,
    require_at_least,
    run_now,
    write_affine_gradients,
    zeros,
)


def count_windows(shape: Shape, window: int, stride: int, padding: int = 0) -> tuple[int, int]:
    """Return (oh, ow), the windows in an image of `shape`; raise UsageError if none fits."""
    if len(shape) != 3:
        raise UsageError(f"expected images (height, width, channels), seen {shape}")
    if min(shape[:2]) + 2 * padding < window:
        raise UsageError(
            f"expected images (height, width, channels) of at least {window} x {window}, "
            f"seen {shape}"
        )
    oh, ow = ((length + 2 * padding - window) // stride + 1 for length in shape[:2])
    return oh, ow


def window_pixels(
    window: int, stride: int, oh: int, ow: int
) -> Iterator[tuple[int, int, tuple[slice, ...]]]:
    """Yield (i, j, index): x[index] is pixel (i, j) of every window, (n, oh, ow, c)."""
    for i in range(window):
        for j in range(window):
            row_slice = slice(i, i + stride * (oh - 1) + 1, stride)
            yield i, j, (slice(None), row_slice, slice(j, j + stride * (ow - 1) + 1, stride))


@dataclass(frozen=True)
class Conv2d:
    """Slide `outputs` square kernels over images: (n, h, w, c) -> (n, oh, ow, outputs).

    oh = (h + 2 padding - kernel) // stride + 1. `weight` is (kernel, kernel, c, outputs), and
    `bias`, if any, (outputs,). The border is padded with zeros. Raises UsageError if samples are
    not (h, w, c) or are smaller than the kernel.
    """

    outputs: int
    kernel: int
    stride: int = 1
    padding: int = 0
    bias: bool = True

    def __post_init__(self) -> None:
        require_at_least(self, outputs=(self.outputs, 1), kernel=(self.kernel, 1))
        require_at_least(self, stride=(self.stride, 1), padding=(self.padding, 0))

    def output_shape(self, shape: Shape) -> Shape:
        return (*count_windows(shape, self.kernel, self.stride, self.padding), self.outputs)

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        weight_shape = (self.kernel, self.kernel, shape[2], self.outputs)
        weight = Parameter(weight_shape, he_normal(self.kernel * self.kernel * shape[2]))
        bias = {"bias": Parameter((self.outputs,), zeros)} if self.bias else {}
        return {"weight": weight, **bias}

    def forward(
        self, p: Mapping[str, Array], x: Array, key: Key | None
    ) -> tuple[Array, tuple[Array, Shape]]:
        columns = self._im2col(x)
        y = columns @ p["weight"].reshape(columns.shape[1], self.outputs)
        if self.bias:
            y += p["bias"]
        return y.reshape(len(x), *self.output_shape(x.shape[1:])), (columns, x.shape)

    def backward(
        self,
        p: Mapping[str, Array],
        g: Mapping[str, Array],
        saved: tuple[Array, Shape],
        dy: Array,
        want_dx: bool,
        later: Later = run_now,
    ) -> Array | None:
        columns, shape = saved
        dy = dy.reshape(len(columns), self.outputs)
        later(partial(write_affine_gradients, g, columns, dy))
        return self._input_gradient(p["weight"], dy, shape) if want_dx else None

    def _im2col(self, x: Array) -> Array:
        (n, _, _, c), k = x.shape, self.kernel
        oh, ow, _ = self.output_shape(x.shape[1:])
        if self._is_pointwise:
            return x.reshape(n * oh * ow, c)
        if on_device(x):
            return im2col.image_to_columns(x, (oh, ow), k, self.stride, self.padding)
        if self.padding:
            p, (h, w) = self.padding, x.shape[1:3]
            padded_images = np.zeros((n, h + 2 * p, w + 2 * p, c), x.dtype)
            padded_images[:, p : p + h, p : p + w] = x
            x = padded_images
        dn, dh, dw, dc = x.strides
        strides = (dn, dh * self.stride, dw * self.stride, dh, dw, dc)
        windows = np.lib.stride_tricks.as_strided(x, (n, oh, ow, k, k, c), strides)
        return windows.reshape(n * oh * ow, k * k * c)

    @property
    def _is_pointwise(self) -> bool:
        """Whether each window is one pixel, and each pixel one window."""
        return (self.kernel, self.stride, self.padding) == (1, 1, 0)

    def _input_gradient(self, weight: Array, dy: Array, shape: Shape) -> Array:
        """Return dx: the gradient of a pixel is the sum over all windows that contain it."""
        (n, h, w, c), pad = shape, self.padding
        oh, ow, _ = self.output_shape(shape[1:])
        if on_device(dy):  # one large product is faster than one per pixel of the kernel
            products = dy @ weight.reshape(-1, self.outputs).T
            if self._is_pointwise:
                return products.reshape(shape)
            return im2col.columns_to_image(products, shape, (oh, ow), self.kernel, self.stride, pad)
        dtype = np.float32 if dy.itemsize == 2 else dy.dtype
        dx = np.zeros((n, h + 2 * pad, w + 2 * pad, c), dtype)
        product = np.empty((len(dy), c), dy.dtype)
        # One product per pixel of the kernel is still in the cache when it is added to dx. The
        # gradient of all columns is kernel^2 times larger and would not be.
        for i, j, index in window_pixels(self.kernel, self.stride, oh, ow):
            np.matmul(dy, weight[i, j].T, out=product)
            dx[index] += product.reshape(n, oh, ow, c)
        return narrowed(dx[:, pad : pad + h, pad : pad + w], dy)


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
