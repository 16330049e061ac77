"""Batch normalization whose mean and variance are of the samples of all ranks.

    forward     sum(1), sum(x)          over ranks -> N, mean
                sum((x - mean)^2)       over ranks -> variance
    backward    sum(dy), sum(dy * y)    over ranks -> dx;  y: normalized x

The squares are summed around the mean of all ranks: sum(x^2) - N mean^2 would cancel. Ranks may
have different numbers of samples, or none; a rank that has joined counts as none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hpctrain.horovod.torch.job import size
from hpctrain.horovod.torch.reductions import allreduce_
from hpctrain.horovod.torch.submission import Sum
from hpctrain.torch.modules.layers import update_running_statistics


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """Normalizes channels of inputs (N, C, ...) by the statistics of all ranks' samples.

    As `torch.nn.BatchNorm1d` and its neighbours on the batch of all ranks, on CPUs and GPUs, in
    training; with one rank, and in evaluation, it is the same as they are. Collective in training:
    ranks call their layers in the same order. The gradients of `weight` and `bias` are this
    rank's own; `DistributedOptimizer` averages them.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalized input, (N, C, ...), and update the running statistics."""
        if size() == 1 or not (self.training or self.running_mean is None):
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps)
        if self.training and self.running_mean is not None:
            unbiased = variance * (count / (count - 1).clamp(min=1))
            update_running_statistics(self, mean, unbiased)
        return output


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float
    ) -> tuple[torch.Tensor, ...]:
        reals = x.to(torch.float64 if x.dtype is torch.float64 else torch.float32)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        sums = torch.cat([reals.sum(dims), reals.new_tensor([x.numel() // max(1, x.size(1))])])
        *_, count = sums = _sum_over_ranks(sums, "mean")
        mean = sums[:-1] / count
        centered = reals - _per_channel(mean, x)
        variance = _sum_over_ranks(centered.square().sum(dims), "variance") / count
        scale = torch.rsqrt(variance + eps)
        normalized = centered * _per_channel(scale, x)
        ctx.save_for_backward(normalized, weight, scale, count)
        ctx.mark_non_differentiable(mean, variance, count)
        output = normalized
        if weight is not None:
            scales, shifts = (_per_channel(p.to(reals.dtype), x) for p in (weight, bias))
            output = torch.addcmul(shifts, normalized, scales)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        normalized, weight, scale, count = ctx.saved_tensors
        reals = gradient.to(normalized.dtype)
        dims = [dim for dim in range(reals.dim()) if dim != 1]
        own_sums = torch.stack([reals.sum(dims), (reals * normalized).sum(dims)])
        grad_bias, grad_weight = (None, None) if weight is None else own_sums.to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, grad_bias, None
        mean, product = _sum_over_ranks(own_sums.clone(), "gradient") / count
        if weight is not None:
            scale = scale * weight
        grad_input = reals - _per_channel(mean, reals)
        grad_input.addcmul_(normalized, _per_channel(product, reals), value=-1)
        grad_input *= _per_channel(scale, reals)
        return grad_input.to(gradient.dtype), grad_weight, grad_bias, None


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.reshape(1, -1, *[1] * (like.dim() - 2))


def _sum_over_ranks(sums: torch.Tensor, name: str) -> torch.Tensor:
    return allreduce_(sums, op=Sum, name=f"sync_batch_norm.{name}")
