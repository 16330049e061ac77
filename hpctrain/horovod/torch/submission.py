"""Operations on tensors, from a call by the user to a submitted request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from hpctrain.core.errors import UsageError
from hpctrain.horovod.torch import job
from hpctrain.horovod.torch.named.engine import Engine
from hpctrain.horovod.torch.named.entries import Entry
from hpctrain.horovod.torch.named.requests import ANY, UNNAMED, Request
from hpctrain.horovod.torch.process_sets import ProcessSet, engine_of, global_process_set
from hpctrain.torch.tensors import as_plain, find_layout_fault, numpy_dtype

Tensor: TypeAlias = torch.Tensor
Tensors: TypeAlias = Sequence[Tensor]
#: The numbers that Horovod gives its reductions.
Average, Sum, Adasum, Min, Max, Product = range(6)
_OPS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")


class Running(NamedTuple):
    """An operation that was submitted."""

    engine: Engine
    entry: Entry
    make_result: Callable[[Any], Any]  #: from the result of the entry

    def wait(self) -> Any:
        """Return the result; raise HorovodInternalError if the operation failed."""
        self.engine.finish(self.entry)
        return self.make_result(self.entry.result)


class Call(NamedTuple):
    """What the calls of all operations have in common."""

    kind: str
    name: str | None
    process_set: ProcessSet = global_process_set
    is_async: bool = True


def first(results: Sequence[Any]) -> Any:
    """Return the result of an operation on a single tensor."""
    return results[0]


def choose_op(average: bool | None, op: int | None) -> str:
    """Return the name of a reduction; raise ValueError if two are given."""
    if average is not None:
        if op is not None:
            raise ValueError("give op or average, not both: op replaces average")
        op = Average if average else Sum
    op = Average if op is None else op
    if op not in range(len(_OPS)):
        raise ValueError(f"op: expected one of hvd.{', hvd.'.join(_OPS)}, seen {op!r}")
    return _OPS[op]


def allreduce(
    call: Call,
    tensors: Tensors,
    op: str,
    factors: tuple[float, float],
    *,
    in_place: bool,
    make_result: Callable[[Any], Any] = list,
) -> Running:
    """Submit the reduction of `tensors`, by `op` and with factors before and after it."""
    engine = engine_of(call.process_set)
    if op == "Adasum":
        _check_adasum(tensors, call.process_set)
    sources = _dense(call, tensors, computes=True)
    _check_mean(call, op, sources[0])
    outputs = sources if in_place else [torch.empty_like(source) for source in sources]
    targets = tensors if in_place else outputs
    shapes = tuple(tuple(source.shape) for source in sources)
    before, after = map(float, factors)
    fields: dict[str, Any] = {"op": op, "prescale": before, "postscale": after}
    return _submit(
        call, engine, sources, shapes, lambda _: make_result(targets),
        outputs=outputs, targets=targets, **fields,
    )  # fmt: skip


def _check_adasum(tensors: Tensors, process_set: ProcessSet) -> None:
    size = job.size()
    if process_set is not global_process_set or size & (size - 1):
        raise NotImplementedError(
            f"Adasum: expected all ranks, a power of two, seen {process_set.size()} of {size} ranks"
        )
    if not all(tensor.is_floating_point() for tensor in tensors):
        raise ValueError(f"Adasum: expected floating-point tensors, seen {tensors[0].dtype}")


def _check_mean(call: Call, op: str, tensor: Tensor) -> None:
    if op == "Average" and tensor.dtype is torch.bool:
        raise ValueError(
            f"{call.kind}: torch.bool has no mean; give op=hvd.Sum, hvd.Min or hvd.Max"
        )


def allgather(call: Call, tensors: Tensors, make_result: Callable[[Any], Any] = list) -> Running:
    """Submit the gathering of `tensors`, whose first dimensions may differ between ranks."""
    engine, sources = engine_of(call.process_set), _dense(call, tensors)
    shapes = tuple((ANY, *source.shape[1:]) for source in sources)
    return _submit(call, engine, sources, shapes, make_result)


def broadcast(call: Call, tensor: Tensor, root_rank: int, *, in_place: bool) -> Running:
    """Submit the broadcast of a tensor from `root_rank`, a global rank."""
    engine, sources = engine_of(call.process_set), _dense(call, [tensor])
    if root_rank not in engine.ranks:
        raise ValueError(f"root_rank: expected one of {list(engine.ranks)}, seen {root_rank}")
    outputs = sources if in_place else [torch.empty_like(sources[0])]
    targets = [tensor] if in_place else outputs
    shapes = (tuple(tensor.shape),)
    return _submit(
        call, engine, sources, shapes, lambda _: targets[0],
        outputs=outputs, targets=targets, root=int(root_rank),
    )  # fmt: skip


def alltoall(call: Call, tensor: Tensor, splits: Tensor | Sequence[int] | None) -> Running:
    """Submit the exchange of rows; rank r gets `splits[r]` of them, or equal parts.

    Its result is the received tensor, with `splits` also the numbers of rows (P,) int32.
    """
    engine = engine_of(call.process_set)
    (source,) = _dense(call, [tensor])
    rows, size = _split_rows(source, splits, engine.world.size), source.shape[1:]
    make_result: Callable[[Any], Any] = first if splits is None else tuple
    return _submit(call, engine, [source], ((ANY, *size),), make_result, splits=rows)


def _split_rows(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int) -> list[int]:
    rows = len(tensor) if tensor.dim() else 0
    if splits is None:
        if not tensor.dim() or rows % size:
            raise ValueError(
                f"alltoall without splits: expected a first dimension divisible by {size} ranks, "
                f"seen shape {list(tensor.shape)}"
            )
        return [rows // size] * size
    if isinstance(splits, torch.Tensor):
        if splits.dtype is not torch.int32:
            raise ValueError(f"alltoall: expected splits of int32, seen {splits.dtype}")
        splits = splits.tolist()
    splits = [int(split) for split in splits]
    if len(splits) != size or min(splits) < 0 or sum(splits) != rows:
        raise ValueError(
            f"alltoall: expected {size} splits that add up to the {rows} rows, seen {splits}"
        )
    return splits


def reducescatter(
    call: Call,
    tensors: Tensors,
    op: int,
    factors: tuple[float, float],
    make_result: Callable[[Any], Any] = list,
) -> Running:
    """Submit the reduction of `tensors` whose rows are scattered; the first ranks may get more."""
    name, engine = choose_op(None, op), engine_of(call.process_set)
    if op not in (Average, Sum):
        raise NotImplementedError(
            f"reducescatter: expected op hvd.Average or hvd.Sum, seen hvd.{name}"
        )
    sources = _dense(call, tensors, computes=True)
    _check_mean(call, name, sources[0])
    if any(source.dim() == 0 for source in sources):
        raise ValueError("reducescatter: expected tensors with a first dimension, seen a scalar")
    shapes = tuple(tuple(source.shape) for source in sources)
    before, after = map(float, factors)
    fields: dict[str, Any] = {"op": name, "prescale": before, "postscale": after}
    return _submit(call, engine, sources, shapes, make_result, **fields)


def make_name(call: Call, engine: Engine) -> str:
    """Return the name by which ranks match the operation: its own, or of this call alone."""
    if call.name is not None:
        return f"{call.kind}.{call.name}"
    return f"{call.kind}{UNNAMED}{engine.next_number(call.kind)}"


def _submit(
    call: Call,
    engine: Engine,
    sources: Tensors,
    shapes: tuple[tuple[int, ...], ...],
    make_result: Callable[[Any], Any],
    *,
    outputs: Tensors = (),
    targets: Tensors = (),
    splits: Sequence[int] = (),
    **fields: Any,
) -> Running:
    """Submit a request with `fields`; see Entry for the tensors."""
    tensor = sources[0]
    dtype, device = str(tensor.dtype)[len("torch.") :], tensor.device.type
    name = make_name(call, engine)
    request = Request(name, call.kind, dtype, shapes, device=device, **fields)
    entry = Entry(request, sources, outputs, targets, splits)
    engine.submit(entry, call.is_async)
    return Running(engine, entry, make_result)


def _dense(call: Call, tensors: Tensors, computes: bool = False) -> list[Tensor]:
    """Return `tensors` without graph, contiguous; raise ValueError if they are of no use here."""
    if not tensors:
        raise ValueError(f"{call.kind}: expected at least one tensor")
    kind = tensors[0].dtype, tensors[0].device
    for tensor in tensors:
        if fault := find_layout_fault(tensor):
            raise ValueError(f"{call.kind}: {fault}")
        if (tensor.dtype, tensor.device) != kind:
            raise ValueError(
                f"{call.kind}: expected tensors of one dtype and device, seen {kind[0]} on "
                f"{kind[1]} and {tensor.dtype} on {tensor.device}"
            )
    if computes:
        try:
            numpy_dtype(kind[0])
        except UsageError as error:
            raise ValueError(f"{call.kind}: {error}") from None
    return list(map(as_plain, tensors))
