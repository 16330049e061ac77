"""Movements of data of `torch.distributed`: broadcast, gather, scatter, all_gather, all_to_all.

Tensors of any dtype travel as bytes. See reductions.py for the calling conventions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from hpctrain.collectives import Group
from hpctrain.core.errors import UsageError
from hpctrain.torch import collectives
from hpctrain.torch.operations import Operations, is_async
from hpctrain.torch.tensors import as_bytes, copy_all_back, copy_back, is_dense

Tensor: TypeAlias = torch.Tensor
Tensors: TypeAlias = Sequence[Tensor]


class DataMovement(Operations):
    """See `torch.distributed.ProcessGroup`."""

    def broadcast(self, tensors: Tensors | Tensor, opts: Any = None, *_: Any) -> Any:
        """Copy the root's tensor to all ranks."""
        tensor = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
        root = opts if isinstance(opts, int) else opts.rootRank if opts is not None else 0

        def call() -> None:
            staged = tensor if is_dense(tensor) else tensor.contiguous()
            self.must_match(f"broadcast from {root} of {tensor.dtype} {tensor.numel()}")
            collectives.broadcast(self.group, as_bytes(staged), root)
            copy_back(staged, tensor)

        return self.start(b"broadcast", tensor.nbytes, call, is_async(opts), [tensor])

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """Collect all ranks' tensors on the root."""
        targets = list(outputs[0]) if outputs else []
        text = f"gather to {opts.rootRank} of {inputs[0].dtype} {inputs[0].numel()}"
        function = partial(collectives.gather, root=opts.rootRank)
        nbytes = inputs[0].nbytes
        return self._move_tensors(b"gather", nbytes, inputs[:1], targets, function, opts, text)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Any:
        """Distribute the root's tensors, one to each rank."""
        sources = list(inputs[0]) if inputs else []
        text = f"scatter from {opts.rootRank} of {outputs[0].dtype} {outputs[0].numel()}"
        function = partial(collectives.scatter, root=opts.rootRank)
        nbytes = outputs[0].nbytes
        return self._move_tensors(b"scatter", nbytes, sources, outputs[:1], function, opts, text)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """Fill the list of tensors with every rank's tensor; they may differ in length."""
        tensor, targets = inputs[0], list(outputs[0])
        call = partial(self._all_gather_list, tensor, targets)
        return self.start(b"all_gather", tensor.nbytes, call, is_async(opts), targets)

    def _all_gather_list(self, tensor: Tensor, targets: Tensors) -> None:
        group, source = self.group, tensor.contiguous()
        if len({target.nbytes for target in targets}) == 1:
            self.must_match(f"all_gather of {tensor.dtype} {tensor.numel()}")
            shape, device = (len(targets), tensor.numel()), tensor.device
            rows = torch.empty(shape, dtype=tensor.dtype, device=device)
            collectives.all_gather(group, as_bytes(source), as_bytes(rows))
            staged: Tensors = [row.view(target.shape) for row, target in zip(rows, targets)]  # noqa: B905
        else:
            staged = [target.contiguous() for target in targets]
            collectives.all_gather_uneven(group, as_bytes(source), list(map(as_bytes, staged)))
        copy_all_back(staged, targets)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Fill `output` with every rank's tensor, one after another."""
        call = partial(self._all_gather_into, output, tensor)
        return self.start(b"all_gather", tensor.nbytes, call, is_async(opts), [output])

    _allgather_base = all_gather_single

    def _all_gather_into(self, output: Tensor, tensor: Tensor) -> None:
        self.must_match(f"all_gather of {tensor.dtype} {tensor.numel()}")
        staged, source = output.contiguous(), tensor.contiguous()
        collectives.all_gather(self.group, as_bytes(source), as_bytes(staged))
        copy_back(staged, output)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Do several `all_gather_single`."""

        def call() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._all_gather_into(output, tensor)

        nbytes = sum(tensor.nbytes for tensor in inputs)
        return self.start(b"all_gather coalesced", nbytes, call, is_async(opts), list(outputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> Any:
        """Fill list r with all tensors of rank r."""

        def call() -> None:
            for i, tensor in enumerate(inputs):
                self._all_gather_list(tensor, [row[i] for row in outputs])

        nbytes = sum(tensor.nbytes for tensor in inputs)
        results = [tensor for row in outputs for tensor in row]
        return self.start(b"all_gather coalesced", nbytes, call, is_async(opts), results)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Any:
        """Exchange parts with all ranks, cut along the first dimension; even without `splits`."""

        def call() -> None:
            staged, source, group = output.contiguous(), tensor.contiguous(), self.group
            sent_parts = _split(source, input_splits, group.link.size)
            received_parts = _split(staged, output_splits, group.link.size)
            arrays = [*map(as_bytes, sent_parts)], [*map(as_bytes, received_parts)]
            collectives.all_to_all_uneven(group, *arrays)
            copy_back(staged, output)

        return self.start(b"all_to_all", tensor.nbytes, call, is_async(opts), [output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Send tensor r to rank r, and fill output r from it."""
        function, nbytes = collectives.all_to_all_uneven, sum(tensor.nbytes for tensor in inputs)
        return self._move_tensors(b"all_to_all", nbytes, inputs, outputs, function, opts)

    def barrier(self, opts: Any = None, *_: Any) -> Any:
        """Wait until every rank has called this."""
        return self.start(b"barrier", 0, self.communicator.world.barrier, is_async(opts), [])

    def _move_tensors(
        self,
        operation: bytes,
        nbytes: int,
        sources: Tensors,
        targets: Tensors,
        function: Callable[[Group, collectives.Arrays, collectives.Arrays], None],
        opts: Any,
        text: str = "",
    ) -> Any:
        """Start `function` on contiguous sources and targets, as bytes; return its Work.

        `text` describes the call where ranks compare it.
        """

        def call() -> None:
            if text:
                self.must_match(text)
            sent, staged = [x.contiguous() for x in sources], [y.contiguous() for y in targets]
            function(self.group, [*map(as_bytes, sent)], [*map(as_bytes, staged)])
            copy_all_back(staged, targets)

        return self.start(operation, nbytes, call, is_async(opts), list(targets), sources)


def _split(tensor: Tensor, sizes: Sequence[int], parts: int) -> Tensors:
    """Return views of contiguous `tensor`, cut along its first dimension; `sizes`: or evenly."""
    if sizes:
        return tensor.split(list(sizes))
    if tensor.size(0) % parts:
        raise UsageError(
            f"all_to_all: expected a first dimension divisible by {parts}, seen {tensor.size(0)}"
        )
    return tensor.split(max(1, tensor.size(0) // parts)) if tensor.numel() else [tensor] * parts
