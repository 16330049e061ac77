"""Reductions of `torch.distributed`: all_reduce, reduce, reduce_scatter, and their coalesced forms.

PyTorch calls these methods from Python, and from C++ (DDP, functional collectives), by the same
names, with lists of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from hpctrain.core.errors import UsageError
from hpctrain.torch import collectives, sparse
from hpctrain.torch.communicator import Communicator
from hpctrain.torch.job import is_ordered
from hpctrain.torch.operations import Operations, is_async
from hpctrain.torch.tensors import as_array, copy_back, is_dense

Tensor: TypeAlias = torch.Tensor
Tensors: TypeAlias = Sequence[Tensor]

_OPERATIONS = {
    "SUM": "sum", "AVG": "mean", "PRODUCT": "prod", "MIN": "min", "MAX": "max",
    "BAND": "and", "BOR": "or", "BXOR": "xor", "PREMUL_SUM": "sum",
}  # fmt: skip
#: By the hash of a ReduceOp, which is its number.
_NAME_OF_OP = {hash(getattr(dist.ReduceOp, op)): name for op, name in _OPERATIONS.items()}
_PREMUL_SUM = hash(dist.ReduceOp.PREMUL_SUM)
#: All-reduces that were bound to an address; a group forgets them all beyond this number.
_MAX_BOUND_CALLS = 1024


class Reductions(Operations):
    """See `torch.distributed.ProcessGroup`."""

    def __init__(self, communicator: Communicator):
        super().__init__(communicator)
        self._ordered = is_ordered()
        self._bound_calls: dict[tuple[int, int, torch.dtype, int], Callable[[], Any]] = {}

    def allreduce(self, tensors: Tensors | Tensor, opts: Any = None, timeout: Any = None) -> Any:
        """Reduce the tensor in place over all ranks."""
        tensor = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
        op, asynchronous = _reduction(opts)
        if tensor.layout is not torch.strided:
            call: Callable[[], Any] = partial(sparse.all_reduce, self.group, tensor)
            return self.start(b"all_reduce sparse", 0, call, asynchronous, [tensor])
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype, hash(op))
        call = self._bound_calls.get(key) or self._bind_all_reduce(tensor, op, key)
        return self.start(b"all_reduce", tensor.nbytes, call, asynchronous, [tensor])

    def _bind_all_reduce(self, tensor: Tensor, op: Any, key: Any) -> Callable[[], Any]:
        """Return the call that reduces `tensor`, bound to its address if it is dense.

        A bound call stays right for any later tensor with the same address, length and dtype.
        """
        name = _NAME_OF_OP[key[-1]]
        if key[-1] == _PREMUL_SUM:
            return partial(self._premultiplied_sum, tensor, op)
        if not is_dense(tensor):
            return partial(self._all_reduce_copy, tensor, name)

        def bind_and_call() -> None:
            x, text = as_array(tensor), f"all_reduce {name} of {tensor.dtype} {tensor.numel()}"
            call = collectives.bind_all_reduce(
                self.group, x, name, self._ordered, self.signature(text)
            )
            if len(self._bound_calls) >= _MAX_BOUND_CALLS:
                self._bound_calls.clear()
            self._bound_calls[key] = call
            call()

        return bind_and_call

    def _premultiplied_sum(self, tensor: Tensor, op: Any) -> None:
        with torch.no_grad():
            tensor.mul_(op.factor)
        self._all_reduce_copy(tensor, "sum")

    def _all_reduce_copy(self, tensor: Tensor, name: str) -> None:
        staged = tensor.contiguous()
        x, text = as_array(staged), f"all_reduce {name} of {tensor.dtype} {tensor.numel()}"
        group = self.group
        collectives.bind_all_reduce(group, x, name, self._ordered, self.signature(text))()
        copy_back(staged, tensor)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """Reduce several tensors in place, as one message where they have one dtype."""
        op, asynchronous = _reduction(opts)
        name = _NAME_OF_OP[hash(op)]

        def reduce_all() -> None:
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
            self._all_reduce_copy(flat, name)
            for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                copy_back(part.view_as(tensor), tensor)

        def reduce_each() -> None:
            for tensor in tensors:
                self._all_reduce_copy(tensor, name)

        call = reduce_all if len({tensor.dtype for tensor in tensors}) == 1 else reduce_each
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return self.start(b"all_reduce coalesced", nbytes, call, asynchronous, list(tensors))

    def reduce(self, tensors: Tensors, opts: Any = None) -> Any:
        """Reduce the tensor in place on the root; others are unchanged."""
        tensor, name = tensors[0], _NAME_OF_OP[hash(opts.reduceOp)]

        def call() -> None:
            staged = tensor.contiguous()
            text = f"reduce {name} to {opts.rootRank} of {tensor.dtype} {tensor.numel()}"
            self.must_match(text)
            collectives.reduce(self.group, as_array(staged), name, opts.rootRank)
            copy_back(staged, tensor)

        return self.start(b"reduce", tensor.nbytes, call, is_async(opts), [tensor])

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Any:
        """Reduce the list of tensors, and keep this rank's."""
        return self._reduce_scatter_each(b"reduce_scatter", outputs[:1], inputs[:1], opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Reduce `tensor`, and write this rank's part of it to `output`."""
        return self._reduce_scatter_each(b"reduce_scatter", [output], [tensor], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Do several `reduce_scatter_single`."""
        return self._reduce_scatter_each(b"reduce_scatter coalesced", outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter_each(
        self, operation: bytes, outputs: Tensors, inputs: Sequence[Tensor | Tensors], opts: Any
    ) -> Any:
        """Start the reduction of each input, a tensor or a list of P tensors; return the Work."""
        op, asynchronous = _reduction(opts)

        def call() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                self._reduce_scatter_rows(output, _flat_copy(source), op)

        nbytes = sum(output.nbytes for output in outputs)
        return self.start(operation, nbytes, call, asynchronous, list(outputs))

    def _reduce_scatter_rows(self, output: Tensor, rows: Tensor, op: Any) -> None:
        name = _NAME_OF_OP[hash(op)]
        if hash(op) == _PREMUL_SUM:
            rows.mul_(op.factor)
        self.must_match(f"reduce_scatter {name} of {rows.dtype} {rows.numel()}")
        staged, group = output.contiguous(), self.group
        collectives.reduce_scatter(group, as_array(rows), name, as_array(staged), self._ordered)
        copy_back(staged, output)


def _flat_copy(source: Tensor | Tensors) -> Tensor:
    """Return the elements of a tensor, or of tensors of the same length, in new memory."""
    if isinstance(source, torch.Tensor):
        return source.detach().reshape(-1).clone()
    if len({tensor.numel() for tensor in source}) > 1:
        raise UsageError("reduce_scatter takes tensors of one length")
    return torch.cat([tensor.detach().reshape(-1) for tensor in source])


def _reduction(opts: Any) -> tuple[Any, bool]:
    """Return the ReduceOp of the options of a call, and whether it is asynchronous."""
    if opts is None:
        return dist.ReduceOp.SUM, True
    if isinstance(opts, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        return opts, True
    return opts.reduceOp, opts.asyncOp
