"""Convolution as one matrix product (im2col; Chellapilla et al., 2006), channels last.

Every window of the image becomes a row, and the kernel a matrix:

    x (n, h, w, c)  --copy-->  columns (n * oh * ow, kernel * kernel * c)
                               @ weight (kernel * kernel * c, outputs)  ->  y (n, oh, ow, outputs)

With channels last, a row of a window is one run of memory, y leaves the product in its final
order, and no array is transposed on either way. The price: `columns` is kernel^2 / stride^2 times
as large as x, and is saved for backward. A GPU gathers it, and scatters its gradient, in one kernel
each; see cuda/im2col.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, namespace, narrowed, on_device
from hpctrain.nn.cuda import im2col
from hpctrain.nn.layer import Key, Parameter, Shape, at_least, he_normal, sum_rows, zeros


def image_shape(shape: Shape, window: int, stride: int, padding: int = 0) -> tuple[int, int]:
    """Return (oh, ow) of the windows in an image of `shape`; raise UsageError if none fits."""
    if len(shape) != 3:
        raise UsageError(f"expected images (h, w, channels), seen {shape}")
    if min(shape[:2]) + 2 * padding < window:
        raise UsageError(f"expected images of at least {window} x {window}, seen {shape}")
    oh, ow = ((length + 2 * padding - window) // stride + 1 for length in shape[:2])
    return oh, ow


def places(
    window: int, stride: int, oh: int, ow: int
) -> Iterator[tuple[int, int, tuple[slice, ...]]]:
    """Yield (i, j, index): x[index] is pixel (i, j) of every window, (n, oh, ow, c)."""
    for i in range(window):
        for j in range(window):
            rows = slice(i, i + stride * (oh - 1) + 1, stride)
            yield i, j, (slice(None), rows, slice(j, j + stride * (ow - 1) + 1, stride))


@dataclass(frozen=True)
class Conv2d:
    """Slide `outputs` square kernels over images: (n, h, w, c) -> (n, oh, ow, outputs).

    oh = (h + 2 padding - kernel) // stride + 1; `weight` is (kernel, kernel, c, outputs), `bias`
    (outputs,) unless left out; the border is padded with zeros. Raises UsageError if samples are
    not (h, w, c) or are smaller than the kernel.
    """

    outputs: int
    kernel: int
    stride: int = 1
    padding: int = 0
    bias: bool = True

    def __post_init__(self) -> None:
        at_least(self, outputs=(self.outputs, 1), kernel=(self.kernel, 1))
        at_least(self, stride=(self.stride, 1), padding=(self.padding, 0))

    def output_shape(self, shape: Shape) -> Shape:
        return (*image_shape(shape, self.kernel, self.stride, self.padding), self.outputs)

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        size = (self.kernel, self.kernel, shape[2], self.outputs)
        weight = Parameter(size, he_normal(self.kernel * self.kernel * shape[2]))
        bias = {"bias": Parameter((self.outputs,), zeros)} if self.bias else {}
        return {"weight": weight, **bias}

    def forward(
        self, p: Mapping[str, Array], x: Array, key: Key | None
    ) -> tuple[Array, tuple[Array, Shape]]:
        columns = self._columns(x)
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
    ) -> Array | None:
        columns, shape = saved
        dy = dy.reshape(len(columns), self.outputs)
        weight = g["weight"].reshape(columns.shape[1], self.outputs)
        namespace(dy).matmul(columns.T, dy, out=weight)
        if self.bias:
            sum_rows(dy, out=g["bias"])
        return self._image(p["weight"], dy, shape) if want_dx else None

    def _columns(self, x: Array) -> Array:
        (n, _, _, c), k = x.shape, self.kernel
        oh, ow, _ = self.output_shape(x.shape[1:])
        if self._is_product:
            return x.reshape(n * oh * ow, c)
        if on_device(x):
            return im2col.columns(x, (oh, ow), k, self.stride, self.padding)
        if self.padding:
            x = _pad(x, self.padding)
        a, b, d, e = x.strides
        strides = (a, b * self.stride, d * self.stride, b, d, e)
        view = np.lib.stride_tricks.as_strided(x, (n, oh, ow, k, k, c), strides)
        return view.reshape(n * oh * ow, k * k * c)

    @property
    def _is_product(self) -> bool:
        """Whether each window is one pixel, and each pixel one window."""
        return (self.kernel, self.stride, self.padding) == (1, 1, 0)

    def _image(self, weight: Array, dy: Array, shape: Shape) -> Array:
        """Return dx: in each pixel the sum of the gradients of all windows that contain it."""
        (n, h, w, c), q = shape, self.padding
        oh, ow, _ = self.output_shape(shape[1:])
        if on_device(dy):  # one large product instead of many
            products = dy @ weight.reshape(-1, self.outputs).T
            if self._is_product:
                return products.reshape(shape)
            return im2col.image(products, shape, (oh, ow), self.kernel, self.stride, q)
        x = np.zeros((n, h + 2 * q, w + 2 * q, c), np.float32 if dy.itemsize == 2 else dy.dtype)
        part = np.empty((len(dy), c), dy.dtype)
        # One product per place of the kernel: the part is still in the cache when it is added,
        # which the kernel^2 times larger gradient of all columns would not be.
        for i, j, index in places(self.kernel, self.stride, oh, ow):
            np.matmul(dy, weight[i, j].T, out=part)
            x[index] += part.reshape(n, oh, ow, c)
        return narrowed(x[:, q : q + h, q : q + w], dy)


def _pad(x: np.ndarray, q: int) -> np.ndarray:
    n, h, w, c = x.shape
    padded = np.zeros((n, h + 2 * q, w + 2 * q, c), x.dtype)
    padded[:, q : q + h, q : q + w] = x
    return padded
