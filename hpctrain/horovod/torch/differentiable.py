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

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from hpctrain.horovod.torch import submission
from hpctrain.horovod.torch.job import rank
from hpctrain.horovod.torch.named.requests import ALLGATHER, ALLREDUCE
from hpctrain.horovod.torch.submission import Call, Sum

Tensor: TypeAlias = torch.Tensor
Factors: TypeAlias = tuple[float, float]


#: An operation on tensors; returns its results.
Run: TypeAlias = Callable[[Call, Sequence[Tensor]], Iterable[Any]]


class _Operation(torch.autograd.Function):
    """An operation, and another one on the gradients of its results."""

    @staticmethod
    def forward(ctx: Any, call: Call, run: Run, run_backward: Run, *tensors: Tensor) -> Any:
        ctx.call, ctx.run_backward = call._replace(name=None), run_backward
        return tuple(run(call, tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *ctx.run_backward(ctx.call, gradients)


def _apply(call: Call, run: Run, run_backward: Run, tensors: Sequence[Tensor]) -> list[Any]:
    """Return the results of `run` on `tensors`; `run_backward` returns their gradients."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(_Operation.apply(call, run, run_backward, *tensors))
    return list(run(call, tensors))


def allreduce(call: Call, tensors: Sequence[Tensor], op: str, factors: Factors) -> list[Tensor]:
    """Return the reductions of `tensors`."""

    def reduce(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
        return submission.allreduce(call, tensors, op, factors, in_place=False).wait()

    return _apply(call, reduce, reduce, tensors)


def allgather(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the gathered `tensors`; a scalar is a row."""
    tensors = [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors]
    rows = [len(tensor) for tensor in tensors]

    def take_own_rows(call: Call, gradients: Sequence[Tensor]) -> Iterator[Tensor]:
        counts = _gather(call, [torch.tensor(rows)])[0].view(-1, len(rows))
        means = _mean(call, gradients)
        before = counts[: call.process_set.rank()].sum(0).tolist()
        own = zip(means, before, rows, strict=True)
        return (mean.narrow(0, start, count) for mean, start, count in own)

    return _apply(call, _gather, take_own_rows, tensors)


def _gather(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    return submission.allgather(call, tensors).wait()


def _mean(call: Call, gradients: Sequence[Tensor]) -> list[Tensor]:
    reduction = call._replace(kind=ALLREDUCE)
    return submission.allreduce(reduction, gradients, "Average", (1.0, 1.0), in_place=False).wait()


def broadcast(call: Call, tensor: Tensor, root: int) -> Tensor:
    """Return the tensor of rank `root`."""

    def send(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [submission.broadcast(call, tensors[0], root, in_place=False).wait()]

    def return_to_root(call: Call, gradients: Sequence[Tensor]) -> list[Tensor]:
        (mean,) = _mean(call, gradients)
        return [mean if rank() == root else torch.zeros_like(mean)]

    return _apply(call, send, return_to_root, [tensor])[0]


def alltoall(call: Call, tensor: Tensor, splits: Any) -> Any:
    """Return the rows that this rank received; with `splits` also their numbers by rank."""

    def send(call: Call, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        running = submission.alltoall(call, tensors[0], splits)
        running.wait()
        return running.entry.result

    def send_back(call: Call, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        return submission.alltoall(call, gradients[0], rows).wait()[:1]

    received, rows = _apply(call, send, send_back, [tensor])
    return received if splits is None else (received, rows)


def reducescatter(call: Call, tensors: Sequence[Tensor], op: int, factors: Factors) -> list[Tensor]:
    """Return this rank's rows of the reduced `tensors`."""

    def reduce(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
        return submission.reducescatter(call, tensors, op, factors).wait()

    def gather(call: Call, gradients: Sequence[Tensor]) -> Iterator[Tensor]:
        factor: Any = factors[0] * factors[1]
        if op == Sum:
            factor *= call.process_set.size()
        gathered = _gather(call._replace(kind=ALLGATHER), gradients)
        return (gradient * factor for gradient in gathered)

    return _apply(call, reduce, gather, tensors)
