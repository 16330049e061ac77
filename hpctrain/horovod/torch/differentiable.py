"""Gradients through operations.

    operation       gradient of an input
    allreduce       the same reduction of the gradients
    allgather       the mean of all ranks' gradients, and of it this rank's rows
    broadcast       the mean of all ranks' gradients on the root, zeros elsewhere
    alltoall        the gradients of its rows, sent back by those that received them
    reducescatter   the gathered gradients; of a sum, multiplied by P

They are Horovod's, so that scripts train as before: the last one is P times the derivative of the
sum of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from hpctrain.horovod.torch import submission
from hpctrain.horovod.torch.job import rank
from hpctrain.horovod.torch.named.requests import ALLGATHER, ALLREDUCE
from hpctrain.horovod.torch.submission import Call, Sum

Tensor: TypeAlias = torch.Tensor
Factors: TypeAlias = tuple[float, float]


def _needs_graph(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def allreduce(call: Call, tensors: Sequence[Tensor], op: str, factors: Factors) -> list[Tensor]:
    """Return the reductions of `tensors`."""
    if _needs_graph(tensors):
        return list(_AllReduce.apply(call, op, factors, *tensors))
    return submission.allreduce(call, tensors, op, factors, in_place=False).wait()


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, op: str, factors: Factors, *tensors: Tensor) -> Any:
        ctx.call, ctx.op, ctx.factors = call._replace(name=None), op, factors
        return tuple(submission.allreduce(call, tensors, op, factors, in_place=False).wait())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        running = submission.allreduce(ctx.call, gradients, ctx.op, ctx.factors, in_place=False)
        return None, None, None, *running.wait()


def allgather(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the gathered `tensors`; a scalar is a row."""
    tensors = [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors]
    if _needs_graph(tensors):
        return list(_AllGather.apply(call, *tensors))
    return submission.allgather(call, tensors).wait()


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> Any:
        ctx.call, ctx.rows = call._replace(name=None), [len(tensor) for tensor in tensors]
        return tuple(submission.allgather(call, tensors).wait())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        call, rows = ctx.call, torch.tensor(ctx.rows)
        counts = submission.allgather(call, [rows]).wait()[0].view(-1, len(rows))
        means = _mean(call, gradients)
        before = counts[: call.process_set.rank()].sum(0).tolist()
        own = zip(means, before, ctx.rows, strict=True)
        return None, *(mean.narrow(0, start, count) for mean, start, count in own)


def _mean(call: Call, gradients: Sequence[Tensor]) -> list[Tensor]:
    reduction = call._replace(kind=ALLREDUCE)
    return submission.allreduce(reduction, gradients, "Average", (1.0, 1.0), in_place=False).wait()


def broadcast(call: Call, tensor: Tensor, root: int) -> Tensor:
    """Return the tensor of rank `root`."""
    if _needs_graph([tensor]):
        return _Broadcast.apply(call, root, tensor)
    return submission.broadcast(call, tensor, root, in_place=False).wait()


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, root: int, tensor: Tensor) -> Any:
        ctx.call, ctx.root = call._replace(name=None), root
        return submission.broadcast(call, tensor, root, in_place=False).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (mean,) = _mean(ctx.call, [gradient])
        return None, None, mean if rank() == ctx.root else torch.zeros_like(mean)


def alltoall(call: Call, tensor: Tensor, splits: Any) -> Any:
    """Return the rows that this rank received; with `splits` also their numbers by rank."""
    if not _needs_graph([tensor]):
        return submission.alltoall(call, tensor, splits).wait()
    received, rows = _AllToAll.apply(call, splits, tensor)
    return received if splits is None else (received, rows)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, splits: Any, tensor: Tensor) -> Any:
        running = submission.alltoall(call, tensor, splits)
        running.wait()
        received, ctx.rows = running.entry.result
        ctx.call = call._replace(name=None)
        ctx.mark_non_differentiable(ctx.rows)
        return received, ctx.rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        returned, _ = submission.alltoall(ctx.call, gradient, ctx.rows).wait()
        return None, None, returned


def reducescatter(call: Call, tensors: Sequence[Tensor], op: int, factors: Factors) -> list[Tensor]:
    """Return this rank's rows of the reduced `tensors`."""
    if _needs_graph(tensors):
        return list(_ReduceScatter.apply(call, op, factors, *tensors))
    return submission.reducescatter(call, tensors, op, factors).wait()


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, op: int, factors: Factors, *tensors: Tensor) -> Any:
        ctx.call = call._replace(name=None, kind=ALLGATHER)
        ctx.factor = factors[0] * factors[1]
        if op == Sum:
            ctx.factor *= call.process_set.size()
        return tuple(submission.reducescatter(call, tensors, op, factors).wait())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gathered = submission.allgather(ctx.call, gradients).wait()
        return None, None, None, *(gradient * ctx.factor for gradient in gathered)
