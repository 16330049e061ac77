"""Reductions by Horovod's names and with its arguments: allreduce, reducescatter.

An operation has a name; it runs once all ranks of its process set have submitted it, whatever they
submit before. Functions that end with `_` write to their tensors, `_async` ones return a handle for
`poll` and `synchronize`. Errors: ValueError for arguments that this rank sees to be wrong,
HorovodInternalError on all ranks where they differ or one was lost.

`op` is Average unless given; `prescale_factor` multiplies tensors before a reduction and
`postscale_factor` its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from hpctrain.horovod.torch import differentiable, submission
from hpctrain.horovod.torch.compression import Compression
from hpctrain.horovod.torch.handles import start
from hpctrain.horovod.torch.named.requests import ALLREDUCE, REDUCESCATTER
from hpctrain.horovod.torch.process_sets import ProcessSet, global_process_set
from hpctrain.horovod.torch.submission import Average, Call, choose_op, first

Tensor: TypeAlias = torch.Tensor
Tensors: TypeAlias = Sequence[Tensor]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin `allreduce`; return its handle."""
    call, factors = Call(ALLREDUCE, name, process_set), (prescale_factor, postscale_factor)
    running = submission.allreduce(
        call, [tensor], choose_op(average, op), factors, in_place=False, make_result=first
    )
    return start(running)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin `allreduce_`; return its handle."""
    call, factors = Call(ALLREDUCE, name, process_set), (prescale_factor, postscale_factor)
    running = submission.allreduce(
        call, [tensor], choose_op(average, op), factors, in_place=True, make_result=first
    )
    return start(running)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the reduction of `tensor` over all ranks; gradients are reduced alike."""
    (result,) = grouped_allreduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
    )
    return result


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce `tensor` in place over all ranks, and return it."""
    grouped_allreduce_([tensor], average, name, op, prescale_factor, postscale_factor, process_set)
    return tensor


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin `grouped_allreduce`; return its handle."""
    call, factors = Call(ALLREDUCE, name, process_set), (prescale_factor, postscale_factor)
    op_name = choose_op(average, op)
    return start(submission.allreduce(call, tensors, op_name, factors, in_place=False))


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin `grouped_allreduce_`; return its handle."""
    call, factors = Call(ALLREDUCE, name, process_set), (prescale_factor, postscale_factor)
    op_name = choose_op(average, op)
    return start(submission.allreduce(call, tensors, op_name, factors, in_place=True))


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return the reductions of several tensors, which are made together."""
    compressed, contexts = zip(*map(compression.compress, tensors), strict=True)
    call = Call(ALLREDUCE, name, process_set, is_async=False)
    factors = prescale_factor, postscale_factor
    results = differentiable.allreduce(call, compressed, choose_op(average, op), factors)
    return [compression.decompress(*pair) for pair in zip(results, contexts, strict=True)]


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors in place, together, and return them."""
    call = Call(ALLREDUCE, name, process_set, is_async=False)
    factors = prescale_factor, postscale_factor
    op_name = choose_op(average, op)
    return submission.allreduce(call, tensors, op_name, factors, in_place=True).wait()


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin `reducescatter`; return its handle."""
    call, factors = Call(REDUCESCATTER, name, process_set), (prescale_factor, postscale_factor)
    return start(submission.reducescatter(call, [tensor], op, factors, first))


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin `grouped_reducescatter`; return its handle."""
    call, factors = Call(REDUCESCATTER, name, process_set), (prescale_factor, postscale_factor)
    return start(submission.reducescatter(call, tensors, op, factors))


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of the reduced tensor; if uneven, the first ranks have one more."""
    (result,) = grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )
    return result


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return `reducescatter` of several tensors, made together."""
    compressed, contexts = zip(*map(compression.compress, tensors), strict=True)
    call = Call(REDUCESCATTER, name, process_set, is_async=False)
    factors = prescale_factor, postscale_factor
    results = differentiable.reducescatter(call, compressed, op, factors)
    return [compression.decompress(*pair) for pair in zip(results, contexts, strict=True)]
