"""Batch normalization over all ranks: each channel, over all samples and pixels of a step.

Forward and backward each sum one small vector per layer over the ranks, so P ranks use the
statistics of the whole batch, as one rank would. Ranks exchange counts and sums, never means, so
shares may be uneven or empty.

    forward    [n, sum x, sum x^2]      backward    [sum dy, sum dy * x_hat]     summed over ranks

x_hat is the normalized x. On a GPU forward and backward are CUDA kernels of cuda/batch_norm.py.
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

    x_hat: np.ndarray  #: (rows, channels), mean 0 and variance 1 over all ranks
    scale: np.ndarray  #: (channels,), 1 / sqrt(variance + epsilon)
    rows: float  #: number of rows of all ranks
    sum_over_ranks: SumOverRanks | None


class BatchNormSavedOnDevice(NamedTuple):
    """The values saved for backward on a device."""

    normalization: batch_norm.Normalization
    rows: float  #: number of rows of all ranks
    sum_over_ranks: SumOverRanks | None


@dataclass(frozen=True)
class BatchNorm:
    """y = (x - mean) / sqrt(variance + epsilon) * weight + bias, per channel (the last axis).

    Training uses mean and variance of the batch; evaluation uses the buffers `mean` and `variance`,
    the running averages of the batches, in which the newest has the weight `momentum`. The running
    variance is unbiased (divided by n - 1). Samples are (..., channels). Source: Ioffe and Szegedy
    (2015).
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
            "mean": Parameter(size, zeros, trainable=False),
            "variance": Parameter(size, ones, trainable=False),
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
        """Do the work of `_train` on a device."""
        sum_over_ranks, flat = key.sum_over_ranks, namespace(x).ascontiguousarray(rows_of(x))
        total, rows = batch_norm.sum_values(flat), float(len(flat))
        if sum_over_ranks is not None:  # through the host: these are only a few numbers
            global_sums = sum_over_ranks(np.concatenate([np.array([rows]), to_host(total)]))
            total, rows = like(total, global_sums[1:]), float(global_sums[0])
        running, update_running = (p["mean"], p["variance"]), rows > 0 and not key.recomputed
        normalization = batch_norm.normalization_from(
            flat, total, rows, running, update_running, self.momentum, self.epsilon
        )
        y = batch_norm.normalize(normalization, p["weight"], p["bias"])
        return y.reshape(x.shape), BatchNormSavedOnDevice(normalization, rows, sum_over_ranks)

    def _train(
        self, p: Mapping[str, np.ndarray], x: np.ndarray, key: Key
    ) -> tuple[np.ndarray, BatchNormSaved]:
        """Normalize `x` on the host by global statistics; update the running statistics."""
        sum_over_ranks = key.sum_over_ranks
        flat = rows_of(widened(x))
        local_mean = np.empty(flat.shape[1], flat.dtype)
        sum_rows(flat, out=local_mean)
        local_mean /= max(len(flat), 1)
        x_hat = flat - local_mean
        squares = x_hat * x_hat
        local_mean_wide = local_mean.astype(np.float64)
        rows, mean, variance = _global_statistics(
            len(flat), local_mean_wide, squares, sum_over_ranks
        )
        if rows and not key.recomputed:
            unbiased_variance = variance * (rows / max(rows - 1, 1))
            for buffer, batch_value in ((p["mean"], mean), (p["variance"], unbiased_variance)):
                buffer *= 1 - self.momentum
                buffer += (self.momentum * batch_value).astype(buffer.dtype)
        scale = (1 / np.sqrt(variance + self.epsilon)).astype(flat.dtype)
        x_hat += (local_mean_wide - mean).astype(flat.dtype)
        x_hat *= scale
        y = np.multiply(x_hat, p["weight"], out=squares)
        y += p["bias"]
        return narrowed(y, x).reshape(x.shape), BatchNormSaved(x_hat, scale, rows, sum_over_ranks)

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
        x_hat, scale, rows, sum_over_ranks = saved
        flat = widened(dy).reshape(x_hat.shape)
        product = flat * x_hat
        sum_rows(flat, out=g["bias"])
        sum_rows(product, out=g["weight"])
        # `g` holds the sums over the rows of this rank; dx needs the sums over all ranks.
        local_sums = np.concatenate([g["bias"], g["weight"]]).astype(np.float64)
        total = local_sums if sum_over_ranks is None else sum_over_ranks(local_sums)
        if not want_dx:
            return None
        total = (total / max(rows, 1)).astype(flat.dtype)
        mean_term, variance_term = total[: len(scale)], total[len(scale) :]
        dx = np.multiply(x_hat, variance_term, out=product)
        np.subtract(flat, dx, out=dx)
        dx -= mean_term
        dx *= scale * p["weight"]
        return narrowed(dx, dy).reshape(dy.shape)


def _backward_on_device(
    weight: Array, g: Mapping[str, Array], saved: BatchNormSavedOnDevice, dy: Array, want_dx: bool
) -> Array | None:
    """Do the work of `BatchNorm.backward` on a device."""
    normalization, rows, sum_over_ranks = saved
    flat = namespace(dy).ascontiguousarray(dy).reshape(normalization.x.shape)
    total = batch_norm.sum_gradients(normalization, flat, g["bias"], g["weight"])
    if sum_over_ranks is not None:
        total = like(total, sum_over_ranks(to_host(total)))
    if not want_dx:
        return None
    return batch_norm.backward(normalization, flat, weight, total, rows).reshape(dy.shape)


def _global_statistics(
    n: int, local_mean: np.ndarray, squares: np.ndarray, sum_over_ranks: SumOverRanks | None
) -> tuple[float, np.ndarray, np.ndarray]:
    """Return rows, mean and variance over all ranks, float64, from this rank's share.

    `squares` is (x - local_mean)^2: float32 sums of x^2 would lose all digits by cancellation.
    """
    square_sums = np.empty(len(local_mean), squares.dtype)
    sum_rows(squares, out=square_sums)
    square_sums = square_sums + n * local_mean * local_mean
    total, rows = np.concatenate([n * local_mean, square_sums]), float(n)
    if sum_over_ranks is not None:
        global_sums = sum_over_ranks(np.concatenate([np.array([n]), total]))
        total, rows = global_sums[1:], float(global_sums[0])
    value_sums, value_square_sums = np.split(total, 2)
    mean = value_sums / max(rows, 1)
    return rows, mean, np.maximum(value_square_sums / max(rows, 1) - mean * mean, 0)
