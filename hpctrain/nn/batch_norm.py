"""Batch normalization over all ranks: every channel, over all samples and pixels of a step.

Forward and backward each sum one small vector per layer over the ranks: P ranks use the statistics
of the whole batch, as one rank would. Counts and sums travel, never means, so shares may be uneven
or empty.

    forward    [n, sum x, sum x^2]      backward    [sum dy, sum dy * normal]     added over ranks

On a GPU both are kernels of our own; see cuda/batch_norm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, like, namespace, narrowed, on_device, to_host, widened
from hpctrain.nn.cuda import batch_norm
from hpctrain.nn.layer import Key, Parameter, Shape, SumOverRanks, ones, rows_of, sum_rows, zeros


class BatchNormSaved(NamedTuple):
    """The values saved for backward on the host."""

    normal: np.ndarray  #: (rows, channels), mean 0 and variance 1 over all ranks
    scale: np.ndarray  #: (channels,), 1 / sqrt(variance + epsilon)
    rows: float  #: of all ranks
    sum_over_ranks: SumOverRanks | None


class BatchNormSavedOnDevice(NamedTuple):
    """The values saved for backward on a device."""

    normal: batch_norm.Normalization
    rows: float  #: of all ranks
    sum_over_ranks: SumOverRanks | None


@dataclass(frozen=True)
class BatchNorm:
    """y = (x - mean) / sqrt(variance + epsilon) * weight + bias, per channel (the last axis).

    Training takes mean and variance from the batch, evaluation the buffers `mean` and `variance`:
    running means with weight `momentum` for the newest, the variance counted with n - 1. Samples
    are (..., channels). Source: Ioffe and Szegedy (2015).
    """

    momentum: float = 0.1
    epsilon: float = 1e-5

    def output_shape(self, shape: Shape) -> Shape:
        if not shape:
            raise UsageError("expected samples (..., channels), seen numbers")
        return shape

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        size = shape[-1:]
        return {
            "weight": Parameter(size, ones, wide=True),
            "bias": Parameter(size, zeros, wide=True),
            "mean": Parameter(size, zeros, trained=False),
            "variance": Parameter(size, ones, trained=False),
        }

    def forward(
        self, p: Mapping[str, Array], x: Array, key: Key | None
    ) -> tuple[Array, BatchNormSaved | BatchNormSavedOnDevice | None]:
        if key is None:
            scale = p["weight"] / namespace(x).sqrt(p["variance"] + self.epsilon)
            y = widened(x) * scale
            y += p["bias"] - p["mean"] * scale
            return narrowed(y, x), None
        return (self._train_on_device if on_device(x) else self._train)(p, x, key)

    def _train_on_device(
        self, p: Mapping[str, Array], x: Array, key: Key
    ) -> tuple[Array, BatchNormSavedOnDevice]:
        """Compute `_train` on a device."""
        add, flat = key.sum_over_ranks, namespace(x).ascontiguousarray(rows_of(x))
        total, rows = batch_norm.sums_of_values(flat), float(len(flat))
        if add is not None:  # summed over ranks through the host: a few numbers
            numbers = add(np.concatenate([np.array([rows]), to_host(total)]))
            total, rows = like(total, numbers[1:]), float(numbers[0])
        running, note = (p["mean"], p["variance"]), rows > 0 and not key.again
        normal = batch_norm.normal_of(flat, total, rows, running, note, self.momentum, self.epsilon)
        y = batch_norm.normalized(normal, p["weight"], p["bias"])
        return y.reshape(x.shape), BatchNormSavedOnDevice(normal, rows, add)

    def _train(
        self, p: Mapping[str, np.ndarray], x: np.ndarray, key: Key
    ) -> tuple[np.ndarray, BatchNormSaved]:
        """Normalize `x` of the host by the statistics of all ranks; update the running ones."""
        add = key.sum_over_ranks
        flat = rows_of(widened(x))
        centre = _mean_of(flat)
        normal = flat - centre
        square = normal * normal
        exact = centre.astype(np.float64)
        rows, mean, variance = _joined(len(flat), exact, square, add)
        if rows and not key.again:
            self._note(p, rows, mean, variance)
        scale = (1 / np.sqrt(variance + self.epsilon)).astype(flat.dtype)
        normal += (exact - mean).astype(flat.dtype)
        normal *= scale
        y = np.multiply(normal, p["weight"], out=square)
        y += p["bias"]
        return narrowed(y, x).reshape(x.shape), BatchNormSaved(normal, scale, rows, add)

    def _note(
        self, p: Mapping[str, np.ndarray], rows: float, mean: np.ndarray, variance: np.ndarray
    ) -> None:
        """Move the running statistics towards those of this batch."""
        unbiased = variance * (rows / max(rows - 1, 1))
        for buffer, new in ((p["mean"], mean), (p["variance"], unbiased)):
            buffer *= 1 - self.momentum
            buffer += (self.momentum * new).astype(buffer.dtype)

    def backward(
        self,
        p: Mapping[str, Array],
        g: Mapping[str, Array],
        saved: BatchNormSaved | BatchNormSavedOnDevice,
        dy: Array,
        want_dx: bool,
    ) -> Array | None:
        if isinstance(saved, BatchNormSavedOnDevice):
            return _backward_on_device(p["weight"], g, saved, dy, want_dx)
        normal, scale, rows, add = saved
        flat = widened(dy).reshape(normal.shape)
        product = flat * normal
        sum_rows(flat, out=g["bias"])
        sum_rows(product, out=g["weight"])
        # The gradients of weight and bias are this rank's part; dx needs those of all ranks.
        parts = np.concatenate([g["bias"], g["weight"]]).astype(np.float64)
        total = parts if add is None else add(parts)
        if not want_dx:
            return None
        total = (total / max(rows, 1)).astype(flat.dtype)
        by_mean, by_variance = total[: len(scale)], total[len(scale) :]
        dx = np.multiply(normal, by_variance, out=product)
        np.subtract(flat, dx, out=dx)
        dx -= by_mean
        dx *= scale * p["weight"]
        return narrowed(dx, dy).reshape(dy.shape)


def _backward_on_device(
    weight: Array, g: Mapping[str, Array], saved: BatchNormSavedOnDevice, dy: Array, want_dx: bool
) -> Array | None:
    """Compute `BatchNorm.backward` on a device."""
    normal, rows, add = saved
    flat = namespace(dy).ascontiguousarray(dy).reshape(normal.x.shape)
    total = batch_norm.sums_of_gradients(normal, flat, g["bias"], g["weight"])
    if add is not None:
        total = like(total, add(to_host(total)))
    if not want_dx:
        return None
    return batch_norm.backward(normal, flat, weight, total, rows).reshape(dy.shape)


def _mean_of(flat: np.ndarray) -> np.ndarray:
    mean = np.empty(flat.shape[1], flat.dtype)
    sum_rows(flat, out=mean)
    mean /= max(len(flat), 1)
    return mean


def _joined(
    n: int, centre: np.ndarray, square: np.ndarray, add: SumOverRanks | None
) -> tuple[float, np.ndarray, np.ndarray]:
    """Return rows, mean and variance over all ranks, float64, from this rank's share.

    `square` is (x - centre)^2: sums of x^2 itself, made in float32, would cancel to nothing.
    """
    spread = np.empty(len(centre), square.dtype)
    sum_rows(square, out=spread)
    total, rows = np.concatenate([n * centre, spread + n * centre * centre]), float(n)
    if add is not None:
        numbers = add(np.concatenate([np.array([n]), total]))
        total, rows = numbers[1:], float(numbers[0])
    sums, squares = np.split(total, 2)
    mean = sums / max(rows, 1)
    return rows, mean, np.maximum(squares / max(rows, 1) - mean * mean, 0)
