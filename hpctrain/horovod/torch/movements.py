"""Movements of tensors by Horovod's names: allgather, broadcast, alltoall, sparse tensors.

An operation has a name; it runs once all ranks of its process set have submitted it, whatever they
submit before. Functions that end with `_` write to their tensors, `_async` ones return a handle for
`poll` and `synchronize`. Errors: ValueError for arguments that this rank sees to be wrong,
HorovodInternalError on all ranks where they differ or one was lost.
`root_rank` is a global rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from hpctrain.horovod.torch import differentiable, submission
from hpctrain.horovod.torch.handles import start, synchronize
from hpctrain.horovod.torch.named.requests import ALLGATHER, ALLTOALL, BROADCAST
from hpctrain.horovod.torch.process_sets import ProcessSet, global_process_set
from hpctrain.horovod.torch.submission import Call, choose_op, first

Tensor: TypeAlias = torch.Tensor
Tensors: TypeAlias = Sequence[Tensor]


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin `allgather`; return its handle."""
    return start(submission.allgather(Call(ALLGATHER, name, process_set), [tensor], first))


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return all ranks' tensors, joined along the first dimension, where they may differ."""
    (result,) = grouped_allgather([tensor], name, process_set)
    return result


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin `grouped_allgather`; return its handle."""
    return start(submission.allgather(Call(ALLGATHER, name, process_set), tensors))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Return `allgather` of several tensors, made together."""
    return differentiable.allgather(Call(ALLGATHER, name, process_set, is_async=False), tensors)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin `broadcast`; return its handle."""
    call = Call(BROADCAST, name, process_set)
    return start(submission.broadcast(call, tensor, root_rank, in_place=False))


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin `broadcast_`; return its handle."""
    call = Call(BROADCAST, name, process_set)
    return start(submission.broadcast(call, tensor, root_rank, in_place=True))


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the root's tensor; its gradient is the mean of all ranks' gradients."""
    return differentiable.broadcast(
        Call(BROADCAST, name, process_set, is_async=False), tensor, root_rank
    )


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Overwrite `tensor` by the root's, and return it."""
    call = Call(BROADCAST, name, process_set, is_async=False)
    return submission.broadcast(call, tensor, root_rank, in_place=True).wait()


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin `alltoall`; return its handle."""
    return start(submission.alltoall(Call(ALLTOALL, name, process_set), tensor, splits))


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the rows that all ranks send to this one; with `splits` also how many, (P,) int32.

    `splits` (P,) int32: the number of rows for each rank; equal parts by default.
    """
    return differentiable.alltoall(
        Call(ALLTOALL, name, process_set, is_async=False), tensor, splits
    )


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Begin the sum of sparse tensors; return a function that returns it, a COO tensor.

    All ranks' entries reach each rank. Raises NotImplementedError unless `op` is Average, of
    floating-point values, or Sum.
    """
    op_name = choose_op(None, op)
    if op_name != "Sum" and not (op_name == "Average" and tensor.is_floating_point()):
        raise NotImplementedError(
            "a sparse reduction: expected op hvd.Sum, or hvd.Average of floating-point values, "
            f"seen hvd.{op_name} of {tensor.dtype}"
        )
    entries = tensor.coalesce() if tensor.is_sparse else tensor.to_sparse()
    handles = [
        allgather_async(part, None if name is None else f"{name}.{suffix}", process_set)
        for part, suffix in (
            (entries.indices().t().contiguous(), "indices"), (entries.values(), "values")
        )
    ]  # fmt: skip

    def finish() -> Tensor:
        indices, values = map(synchronize, handles)
        if op_name == "Average":
            values = values / process_set.size()
        shape = tensor.shape
        return torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=True)

    return finish
