"""Movements of data of `torch.distributed`: broadcast, gather, scatter, all_gather, all_to_all.

Tensors of any dtype travel as bytes. See reductions.py for the calling conventions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from hpctrain.collectives import Group, broadcast
from hpctrain.collectives.rooted import exchange_parts
from hpctrain.core.errors import UsageError
from hpctrain.torch import collectives
from hpctrain.torch.operations import Operations, describe, describe_kind, for_each, total_bytes
from hpctrain.torch.tensors import as_bytes, copy_back, is_dense

Tensor: TypeAlias = torch.Tensor
Tensors: TypeAlias = Sequence[Tensor]


class Movement(NamedTuple):
    """A movement of tensors as bytes, as the watch and the comparison of calls name it."""

    name: bytes
    text: str  #: before the root, where there is one; empty: lengths may differ
    function: Callable[[Group, collectives.Arrays, collectives.Arrays, int], None]


GATHER = Movement(b"gather", "gather to", collectives.gather)
SCATTER = Movement(b"scatter", "scatter from", collectives.scatter)
ALL_TO_ALL = Movement(b"all_to_all", "", lambda group, x, y, _: exchange_parts(group, x, y))


class DataMovement(Operations):
    """See `torch.distributed.ProcessGroup`."""

    def broadcast(self, tensors: Tensors | Tensor, opts: Any = None, *_: Any) -> Any:
        """Copy the root's tensor to all ranks."""
        tensor = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
        root = opts if isinstance(opts, int) else opts.rootRank if opts is not None else 0
        call = partial(self._broadcast, tensor, root)
        return self.start(b"broadcast", tensor.nbytes, call, [tensor], opts)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        staged = tensor if is_dense(tensor) else tensor.contiguous()
        self.must_match(f"broadcast from {root} of {describe(tensor)}")
        broadcast(self.group, as_bytes(staged), root)
        copy_back(staged, tensor)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """Collect all ranks' tensors on the root."""
        targets = outputs[0] if outputs else ()
        return self._move(GATHER, inputs[:1], targets, inputs[:1], opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Any:
        """Distribute the root's tensors, one to each rank."""
        sources = inputs[0] if inputs else ()
        return self._move(SCATTER, sources, outputs[:1], outputs[:1], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Send tensor r to rank r, and fill output r from it."""
        return self._move(ALL_TO_ALL, inputs, outputs, inputs, opts)

    def _move(
        self, movement: Movement, sources: Tensors, targets: Tensors, own: Tensors, opts: Any
    ) -> Any:
        """Start `movement` from contiguous sources to targets; return its Work.

        `own`: the tensors that this rank has, whatever the root is.
        """
        root = opts.rootRank if movement.text else 0

        def call() -> None:
            self.must_match(
                f"{movement.text} {root} of {describe(own[0])}"
                if movement.text
                else f"all_to_all of {describe_kind(own[0])}"
            )
            sent, staged = [x.contiguous() for x in sources], [y.contiguous() for y in targets]
            movement.function(self.group, [*map(as_bytes, sent)], [*map(as_bytes, staged)], root)
            for_each(copy_back, staged, targets)

        nbytes = total_bytes(own)
        return self.start(movement.name, nbytes, call, targets, opts, sources=sources)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """Fill the list of tensors with every rank's tensor; they may differ in length."""
        call = partial(self._all_gather_list, outputs[0], inputs[0])
        return self.start(b"all_gather", inputs[0].nbytes, call, outputs[0], opts)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> Any:
        """Fill list r with all tensors of rank r."""
        call = partial(for_each, self._all_gather_list, zip(*outputs, strict=True), inputs)
        results = [tensor for row in outputs for tensor in row]
        return self.start(b"all_gather coalesced", total_bytes(inputs), call, results, opts)

    def _all_gather_list(self, targets: Tensors, tensor: Tensor) -> None:
        group, source = self.group, tensor.contiguous()
        if len({target.nbytes for target in targets}) == 1:
            self.must_match(f"all_gather of {describe(tensor)}")
            shape, device = (len(targets), tensor.numel()), tensor.device
            rows = torch.empty(shape, dtype=tensor.dtype, device=device)
            collectives.all_gather(group, as_bytes(source), as_bytes(rows))
            staged: Tensors = [row.view(target.shape) for row, target in zip(rows, targets)]  # noqa: B905
        else:
            lengths, own_length = [target.numel() for target in targets], tensor.numel()
            text = f"all_gather of {describe_kind(tensor)} with lengths {lengths}"
            if own_length != lengths[group.link.rank]:
                text = f"{text} and its own of {own_length}"
            self.must_match(text)
            staged = [target.contiguous() for target in targets]
            collectives.all_gather_uneven(group, as_bytes(source), list(map(as_bytes, staged)))
        for_each(copy_back, staged, targets)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Fill `output` with every rank's tensor, one after another."""
        call = partial(self._all_gather_into, output, tensor)
        return self.start(b"all_gather", tensor.nbytes, call, [output], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Do several `all_gather_single`."""
        call = partial(for_each, self._all_gather_into, outputs, inputs)
        return self.start(b"all_gather coalesced", total_bytes(inputs), call, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather_into(self, output: Tensor, tensor: Tensor) -> None:
        self.must_match(f"all_gather of {describe(tensor)}")
        staged, source = output.contiguous(), tensor.contiguous()
        collectives.all_gather(self.group, as_bytes(source), as_bytes(staged))
        copy_back(staged, output)

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
            staged, source, size = output.contiguous(), tensor.contiguous(), self.group.link.size
            fault = _split_fault(source, input_splits, size) or _split_fault(
                staged, output_splits, size
            )
            self.must_match(fault or f"all_to_all of {describe_kind(tensor)}")
            if fault:
                raise UsageError(fault)
            sent, received = _split(source, input_splits, size), _split(staged, output_splits, size)
            exchange_parts(self.group, [*map(as_bytes, sent)], [*map(as_bytes, received)])
            copy_back(staged, output)

        return self.start(ALL_TO_ALL.name, tensor.nbytes, call, [output], opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, *_: Any) -> Any:
        """Wait until every rank has called this."""
        return self.start(b"barrier", 0, self.communicator.world.barrier, [], opts)


def _split_fault(tensor: Tensor, sizes: Sequence[int], parts: int) -> str:
    """Return why `tensor` cannot be cut into `parts`; empty if it can."""
    if sizes or not tensor.size(0) % parts:
        return ""
    return f"all_to_all: expected a first dimension divisible by {parts}, seen {tensor.size(0)}"


def _split(tensor: Tensor, sizes: Sequence[int], parts: int) -> Tensors:
    """Return views of contiguous `tensor`, cut along its first dimension; `sizes`: or evenly."""
    if sizes:
        return tensor.split(list(sizes))
    return tensor.split(max(1, tensor.size(0) // parts)) if tensor.numel() else [tensor] * parts
