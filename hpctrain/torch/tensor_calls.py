"""Collectives on tensors of PyTorch: `ht.torch.allreduce` and the others.

They call the collectives on arrays, world/calls/calls.py, with the same `op`, `algorithm`,
`root`, `world` and `check`. Results are written in place, into memory of the CPU or of CUDA:

    contiguous           the collective works on the tensor's memory, without a copy
    other strides        on a copy, which is copied back
    a parameter          as under torch.no_grad()
    part of a graph      refused: autograd would not know of it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hpctrain.collectives.signature import fault_signature, must_match
from hpctrain.core.errors import UsageError
from hpctrain.torch.job import start_job
from hpctrain.torch.modules.inputs import as_tensor
from hpctrain.torch.tensors import (
    as_array,
    as_plain,
    copy_back,
    find_layout_fault,
    numpy_dtype,
    own_stream,
)
from hpctrain.world import World
from hpctrain.world.calls import calls


def allreduce(
    tensor: torch.Tensor,
    op: str = "sum",
    algorithm: str = "auto",
    world: World | None = None,
    check: bool = True,
) -> None:
    """Reduce `tensor` in place over all ranks; see `ht.allreduce`."""
    _write("allreduce", tensor, world, check, op=op, algorithm=algorithm)


def reduce(
    tensor: torch.Tensor,
    op: str = "sum",
    root: int = 0,
    world: World | None = None,
    check: bool = True,
) -> None:
    """Reduce `tensor` in place to `root`; elsewhere it ends with partial results."""
    _write("reduce", tensor, world, check, op=op, root=root)


def broadcast(
    tensor: torch.Tensor, root: int = 0, world: World | None = None, check: bool = True
) -> None:
    """Copy `root`'s `tensor` into every rank's `tensor`."""
    _write("broadcast", tensor, world, check, root=root)


def reduce_scatter(
    tensor: torch.Tensor, op: str = "sum", world: World | None = None, check: bool = True
) -> torch.Tensor:
    """Return this rank's row of reduced `tensor` (P, ...), a view of it; overwrite other rows."""
    return tensor[_write("reduce_scatter", tensor, world, check, op=op)]


def scatter(
    tensor: torch.Tensor, root: int = 0, world: World | None = None, check: bool = True
) -> torch.Tensor:
    """Return row r of `root`'s `tensor` (P, ...) on rank r: a view of rank r's own tensor."""
    return tensor[_write("scatter", tensor, world, check, root=root)]


def all_gather(
    tensor: torch.Tensor, world: World | None = None, check: bool = True
) -> torch.Tensor:
    """Return a new tensor (P, *tensor.shape) of every rank's `tensor`."""
    return _read("all_gather", tensor, world, check)


def gather(
    tensor: torch.Tensor, root: int = 0, world: World | None = None, check: bool = True
) -> torch.Tensor | None:
    """Return a new tensor (P, *tensor.shape) of every rank's `tensor` on `root`, None elsewhere."""
    return _read("gather", tensor, world, check, root=root)


def all_to_all(
    tensor: torch.Tensor, world: World | None = None, check: bool = True
) -> torch.Tensor:
    """Return a new tensor like `tensor` (P, ...): on rank r, row s is row r of rank s."""
    return _read("all_to_all", tensor, world, check)


def bind(
    tensor: torch.Tensor, op: str = "sum", algorithm: str = "auto", world: World | None = None
) -> Callable[[], None]:
    """Return a call that reduces contiguous `tensor` in place, without look-ups; see `ht.bind`."""
    world = world or start_job(None)
    fault = _find_fault(tensor)
    if not fault and not tensor.is_contiguous():
        fault = f"expected a contiguous tensor, seen strides {tensor.stride()}"
    _raise_on_all(world, "bind", fault, check=True)
    tensor = tensor.detach()
    address, array = tensor.data_ptr(), as_array(tensor).reshape(tensor.shape)
    with own_stream(tensor):
        reduce_array = calls.bind(array, op, algorithm, world=world)

    def reduce_tensor() -> None:
        if tensor.data_ptr() != address:
            raise UsageError("ht.torch.bind: the memory of the tensor has changed; bind it again")
        with own_stream(tensor):
            reduce_array()
        torch.autograd.graph.increment_version(tensor)

    return reduce_tensor


def _write(
    name: str, tensor: torch.Tensor, world: World | None, check: bool, **options: Any
) -> int:
    """Make call `name`, which writes to `tensor`; return this rank."""
    world = world or start_job(None)
    with _dense(name, tensor, world, check) as dense:
        array = as_array(dense).reshape(dense.shape)
        getattr(calls, name)(array, world=world, check=check, **options)
        copy_back(dense, tensor)
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
    return world.rank


def _read(name: str, tensor: torch.Tensor, world: World | None, check: bool, **options: Any) -> Any:
    """Return the result of call `name`, a new tensor or None."""
    world = world or start_job(None)
    with _dense(name, tensor, world, check) as dense:
        array = as_array(dense).reshape(dense.shape)
        result = getattr(calls, name)(array, world=world, check=check, **options)
        return None if result is None else as_tensor(result)


@contextmanager
def _dense(name: str, tensor: torch.Tensor, world: World, check: bool) -> Iterator[torch.Tensor]:
    """Yield `tensor`, or a contiguous copy; raise UsageError, with `check` on all ranks."""
    _raise_on_all(world, name, _find_fault(tensor), check)
    with own_stream(tensor):
        yield as_plain(tensor)


def _raise_on_all(world: World, name: str, fault: str, check: bool) -> None:
    if fault:
        text = f"ht.torch.{name}: {fault}"
        if check:
            must_match(world.main, fault_signature(text))
        raise UsageError(text)


def _find_fault(tensor: Any) -> str:
    """Return why no collective takes `tensor`; empty if one does."""
    if not isinstance(tensor, torch.Tensor):
        return f"expected a tensor, seen {type(tensor).__name__}; arrays go to the calls of ht"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"expected a plain tensor, seen {type(tensor).__name__}; give its local tensor"
    if fault := find_layout_fault(tensor):
        return f"{fault}; use .to_dense() or .cpu()"
    if tensor.requires_grad and not tensor.is_leaf:
        return (
            "expected a tensor without a graph, seen one that autograd follows "
            f"({tensor.grad_fn}): its gradient would be wrong; use .detach()"
        )
    if any(stride == 0 < n - 1 for stride, n in zip(tensor.stride(), tensor.shape, strict=True)):
        return f"expected elements with memory of their own, seen strides {tensor.stride()}; clone"
    try:
        numpy_dtype(tensor.dtype)
    except UsageError as error:
        return str(error)
    return ""
