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
from hpctrain.torch.operations import Operations, describe, describe_kind, for_each, total_bytes
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
        op = _reduce_op(opts)
        if tensor.layout is not torch.strided:
            call: Callable[[], Any] = partial(self._all_reduce_sparse, tensor)
            return self.start(b"all_reduce sparse", 0, call, [tensor], opts)
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype, hash(op))
        call = self._bound_calls.get(key) or self._find_all_reduce(tensor, op, key)
        return self.start(b"all_reduce", tensor.nbytes, call, [tensor], opts)

    def _all_reduce_sparse(self, tensor: Tensor) -> None:
        shape = tuple(tensor.shape)
        self.must_match(f"all_reduce of sparse {describe_kind(tensor)}, shape {shape}")
        sparse.all_reduce(self.group, tensor)

    def _find_all_reduce(self, tensor: Tensor, op: Any, key: Any) -> Callable[[], Any]:
        """Return the call that reduces `tensor`, bound to its address if it is dense.

        A bound call stays right for any later tensor with the same address, length and dtype.
        """
        if key[-1] == _PREMUL_SUM:
            return partial(self._premultiplied_sum, tensor, op)
        name = _NAME_OF_OP[key[-1]]
        if not is_dense(tensor):
            return partial(self._all_reduce_copy, tensor, name)
        return partial(self._bind_and_call, tensor, name, key)

    def _bind(self, tensor: Tensor, name: str) -> Callable[[], Any]:
        text = f"all_reduce {name} of {describe(tensor)}"
        x, call = as_array(tensor), self.signature(text)
        return collectives.bind_all_reduce(self.group, x, name, self._ordered, call)

    def _bind_and_call(self, tensor: Tensor, name: str, key: Any) -> None:
        call = self._bind(tensor, name)
        if len(self._bound_calls) >= _MAX_BOUND_CALLS:
            self._bound_calls.clear()
        self._bound_calls[key] = call
        call()

    def _all_reduce_copy(self, tensor: Tensor, name: str) -> None:
        staged = tensor.contiguous()
        self._bind(staged, name)()
        copy_back(staged, tensor)

    def _premultiplied_sum(self, tensor: Tensor, op: Any) -> None:
        with torch.no_grad():
            tensor.mul_(op.factor)
        self._all_reduce_copy(tensor, "sum")

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """Reduce several tensors in place, as one message where they have one dtype."""
        name, is_alike = _NAME_OF_OP[hash(_reduce_op(opts))], len({t.dtype for t in tensors}) == 1
        each = partial(for_each, partial(self._all_reduce_copy, name=name), tensors)
        call = partial(self._all_reduce_joined, tensors, name) if is_alike else each
        return self.start(b"all_reduce coalesced", total_bytes(tensors), call, tensors, opts)

    def _all_reduce_joined(self, tensors: Tensors, name: str) -> None:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        self._all_reduce_copy(flat, name)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            copy_back(part.view_as(tensor), tensor)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Any:
        """Reduce the tensor in place on the root; others are unchanged."""
        call = partial(self._reduce, tensors[0], _NAME_OF_OP[hash(opts.reduceOp)], opts.rootRank)
        return self.start(b"reduce", tensors[0].nbytes, call, tensors[:1], opts)

    def _reduce(self, tensor: Tensor, name: str, root: int) -> None:
        self.must_match(f"reduce {name} to {root} of {describe(tensor)}")
        staged = tensor.contiguous()
        collectives.reduce(self.group, as_array(staged), name, root)
        copy_back(staged, tensor)

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
        reduce = partial(self._reduce_scatter_rows, op=_reduce_op(opts))
        call = partial(for_each, reduce, outputs, inputs)
        return self.start(operation, total_bytes(outputs), call, outputs, opts)

    def _reduce_scatter_rows(self, output: Tensor, source: Tensor | Tensors, op: Any) -> None:
        name, rows = _NAME_OF_OP[hash(op)], _flat_copy(source)
        if hash(op) == _PREMUL_SUM:
            rows.mul_(op.factor)
        self.must_match(f"reduce_scatter {name} of {describe(rows)}")
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


def _reduce_op(opts: Any) -> Any:
    """Return the ReduceOp of the options of a call."""
    if opts is None:
        return dist.ReduceOp.SUM
    is_op = isinstance(opts, (dist.ReduceOp, dist.ReduceOp.RedOpType))
    return opts if is_op else opts.reduceOp
