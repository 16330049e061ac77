"""Layers whose results do not depend on the number of ranks: Dropout and BatchNorm.

`replace_layers` changes the class of these layers in place, to subclasses that compute as PyTorch
does except within a gradient of a Replica, whose key says step, samples and how to sum over ranks.

Dropout: the mask of a sample is a function of the seed, the step, the sample and the number of the
call, as are other random numbers; see draws.py.

BatchNorm: mean and variance are computed over the global batch, as with one rank:

    forward    [n, n mean, n (var + mean^2)]    backward    [sum dy, sum dy x_hat]    over ranks
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpctrain.nn.dropout import keep_mask
from hpctrain.nn.layer import SumOverRanks
from hpctrain.torch.modules.draws import current_key, is_batch, next_call_key


class SampleDropout(nn.Dropout):
    """Dropout with a mask that depends on the sample, not on the rank that holds it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` (n, ...) with elements set to 0; for another first dim as PyTorch does."""
        key = current_key() if self.training else None
        if key is None or not 0 < self.p < 1 or not is_batch(x.shape):
            return super().forward(x)
        mask = keep_mask(next_call_key(), len(x), prod(x.shape[1:]), self.p)
        factor = torch.from_numpy(mask).reshape(x.shape).to(x.device, x.dtype) / (1 - self.p)
        return x.mul_(factor) if self.inplace else x * factor


class RankBatchNorm(_BatchNorm):
    """Batch normalization over the global batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` (n, channels, ...) normalized; see `torch.nn.BatchNorm2d`."""
        uses_batch = self.training or self.running_mean is None
        key = current_key() if uses_batch else None
        if key is None or (key.sum_over_ranks is None and not key.recomputed):
            # Also torch.nn.SyncBatchNorm, which has no kernel for CPUs.
            return _BatchNorm.forward(self, x)
        self._check_input_dim(x)
        statistics = _sum_statistics(x, key.sum_over_ranks)
        tracks = self.training and self.track_running_stats and self.running_mean is not None
        if tracks and statistics.rows and not key.recomputed:
            unbiased = statistics.variance * (statistics.rows / max(statistics.rows - 1, 1))
            update_running_statistics(self, statistics.mean, unbiased)
        return _Normalization.apply(x, self.weight, self.bias, statistics, self.eps)


@torch.no_grad()
def update_running_statistics(
    layer: _BatchNorm, mean: torch.Tensor, unbiased_variance: torch.Tensor
) -> None:
    """Average the statistics of a batch, per channel, into the layer's, as PyTorch does."""
    factor = layer.momentum or 0.0
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked += 1
        if layer.momentum is None:  # the mean over all batches
            factor = 1 / float(layer.num_batches_tracked)
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), factor)
    layer.running_var.lerp_(unbiased_variance.to(layer.running_var.dtype), factor)


class Statistics(NamedTuple):
    """Statistics per channel over the global batch."""

    rows: float  #: the number of values of a channel
    mean: torch.Tensor  #: float64 (channels,)
    variance: torch.Tensor  #: float64 (channels,), divided by `rows`
    sum_over_ranks: SumOverRanks | None


class _Normalization(torch.autograd.Function):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, statistics over the global batch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: Statistics,
        eps: float,
    ) -> torch.Tensor:
        dtype = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
        mean, variance = statistics.mean.to(dtype), statistics.variance.to(dtype)
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps, ctx.statistics, ctx.has_bias = eps, statistics, bias is not None
        if not x.numel():
            return x.clone()
        return nn.functional.batch_norm(x, mean, variance, weight, bias, eps=eps)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight, mean, variance = ctx.saved_tensors
        if x.numel():
            arrays = (dy.contiguous(), x, weight, mean, variance, None, None)
            dx, own_weight, own_bias = torch.ops.aten.native_batch_norm_backward(
                *arrays, train=False, eps=ctx.eps, output_mask=[True] * 3
            )
        else:
            dx, own_weight, own_bias = dy, torch.zeros_like(mean), torch.zeros_like(mean)
        total = torch.cat([own_bias, own_weight]).double()
        if ctx.statistics.sum_over_ranks is not None:
            total = _sum_over_ranks(total, ctx.statistics.sum_over_ranks)
        mean_dy, mean_dy_x_hat = (total / max(ctx.statistics.rows, 1)).to(mean.dtype).chunk(2)
        inverse = torch.rsqrt(variance + ctx.eps)
        scale = inverse if weight is None else inverse * weight
        slope = scale * inverse * mean_dy_x_hat
        shift = scale * mean_dy - slope * mean
        # dx = scale dy - scale (mean of dy) - scale x_hat (mean of dy x_hat)
        dims = [1, -1] + [1] * (x.dim() - 2)
        dx = dx - (x * slope.reshape(dims).to(x.dtype) + shift.reshape(dims).to(x.dtype))
        dw = own_weight if weight is not None else None
        return dx, dw, own_bias if ctx.has_bias else None, None, None


def _sum_statistics(x: torch.Tensor, sum_over_ranks: SumOverRanks | None) -> Statistics:
    """Return the statistics of `x` (n, channels, ...) over all ranks; collective."""
    dims = [0, *range(2, x.dim())]
    n = x.numel() // x.shape[1]
    variance = mean = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    if n:
        float_input = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        variance, mean = (
            v.double() for v in torch.var_mean(float_input.detach(), dims, correction=0)
        )
    rows = torch.tensor([n], dtype=torch.float64, device=x.device)
    total = torch.cat([rows, n * mean, n * (variance + mean * mean)])
    if sum_over_ranks is not None:
        total = _sum_over_ranks(total, sum_over_ranks)
    count = float(total[0])
    mean, mean_square = (total[1:] / max(count, 1)).chunk(2)
    return Statistics(count, mean, (mean_square - mean * mean).clamp_min(0), sum_over_ranks)


def _sum_over_ranks(statistics: torch.Tensor, sum_over_ranks: SumOverRanks) -> torch.Tensor:
    return torch.from_numpy(sum_over_ranks(statistics.cpu().numpy())).to(statistics.device)


class RankBatchNorm1d(RankBatchNorm, nn.BatchNorm1d):
    """See RankBatchNorm."""


class RankBatchNorm2d(RankBatchNorm, nn.BatchNorm2d):
    """See RankBatchNorm."""


class RankBatchNorm3d(RankBatchNorm, nn.BatchNorm3d):
    """See RankBatchNorm."""


class RankSyncBatchNorm(RankBatchNorm, nn.SyncBatchNorm):
    """See RankBatchNorm."""


REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: SampleDropout,
    nn.BatchNorm1d: RankBatchNorm1d,
    nn.BatchNorm2d: RankBatchNorm2d,
    nn.BatchNorm3d: RankBatchNorm3d,
    nn.SyncBatchNorm: RankSyncBatchNorm,
}


ORIGINALS = {replacement: original for original, replacement in REPLACEMENTS.items()}


def replace_layers(module: nn.Module) -> None:
    """Let Dropout and BatchNorm within `module` compute as above; subclasses stay as they are."""
    for layer in module.modules():
        layer.__class__ = REPLACEMENTS.get(type(layer), type(layer))


def restore_layers(module: nn.Module) -> None:
    """Restore the classes of the layers within `module`."""
    for layer in module.modules():
        layer.__class__ = ORIGINALS.get(type(layer), type(layer))
