"""Tensors as arrays: the same memory, without a copy, and in the order of PyTorch's streams.

An alias is made from the address: `tensor.numpy()` would fix the size of the storage for ever, and
FSDP resizes storages. So an alias does not keep its tensor alive: who uses it must.

On a GPU an operation has a stream of its own, between its caller's earlier work and all that is
queued once the operation has returned:

    caller's stream   [ layer 3 ]*            [ layer 2 ][ layer 1 ] ...
    own stream                   *[ copies ][ additions ]| the host waits here
    any stream                                           [ reads the sum ]
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import Any, TypeVar

import numpy as np
import torch

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import array_at, event, foreign_stream, on_device, wait_for

T = TypeVar("T")

_NAMES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
    "complex64", "complex128",
)  # fmt: skip
_DTYPES: dict[torch.dtype, np.dtype] = {getattr(torch, name): np.dtype(name) for name in _NAMES}


@cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Return the dtype of NumPy for `dtype`; raise UsageError if sums of it are not defined."""
    if dtype is torch.bfloat16:
        from ml_dtypes import bfloat16  # late: few programs need it

        return np.dtype(bfloat16)
    if dtype not in _DTYPES:
        expected = ", ".join(map(str, (*_DTYPES, torch.bfloat16)))
        raise UsageError(f"a reduction needs a tensor of {expected}; seen {dtype}")
    return _DTYPES[dtype]


def as_array(tensor: torch.Tensor) -> Any:
    """Return the flat array of `tensor`'s elements, which must be contiguous."""
    return _alias(tensor, numpy_dtype(tensor.dtype))


def as_bytes(tensor: torch.Tensor) -> Any:
    """Return contiguous `tensor`, of any dtype, as a flat array of uint8."""
    return _alias(tensor, np.dtype(np.uint8))


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` without a graph, contiguous; a copy only where it has another layout."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def find_layout_fault(tensor: torch.Tensor) -> str:
    """Return why no collective takes memory as that of `tensor`; empty if one does."""
    if tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda"):
        return ""
    return f"expected a dense tensor of CPU or CUDA, seen {tensor.layout} on {tensor.device}"


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of `tensor` fill one range of memory, in any order."""
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)


def _alias(tensor: torch.Tensor, dtype: np.dtype) -> Any:
    nbytes = tensor.nbytes
    if tensor.is_cuda:
        return array_at(tensor.data_ptr(), nbytes, dtype, tensor.device.index)
    if nbytes == 0:
        return np.empty(0, dtype)
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    return np.ndarray(nbytes // dtype.itemsize, dtype, memory)


def caller_stream(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Let CuPy work in PyTorch's current stream: of this thread, which may be autograd's."""
    if not tensor.is_cuda:
        return nullcontext()
    return foreign_stream(torch.cuda.current_stream(tensor.device).cuda_stream, tensor.device.index)


@contextmanager
def joined_streams(x: Any) -> Iterator[None]:
    """Order work in PyTorch's current stream after CuPy's on array `x`, and CuPy's after it.

    Within the block both work in PyTorch's stream.
    """
    if not on_device(x):
        yield
        return
    cupy_event, device = event(x), x.device.id
    with foreign_stream(torch.cuda.current_stream(device).cuda_stream, device):
        wait_for(cupy_event)
        yield
        torch_event = event(x)
    wait_for(torch_event)


def between_cupy_work(method: Callable[..., T]) -> Callable[..., T]:
    """Let a method of a replica work with PyTorch between CuPy's work on its arena."""

    @wraps(method)
    def call(replica: Any, *args: Any, **options: Any) -> T:
        with joined_streams(replica.arena.grad):
            return method(replica, *args, **options)

    return call


class _ThreadStreams(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[torch.device, Any] = {}


_thread_streams = _ThreadStreams()


def own_stream(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Return the stream of an operation on `tensor`, to be entered once, in any thread.

    Work in it, by PyTorch and CuPy, comes after the present work of this thread's current stream.
    At its end the host waits for it: then all streams may read the results, and the scratch memory
    and temporary tensors of the operation are free.
    """
    if not tensor.is_cuda:
        return nullcontext()
    return _own_stream(tensor.device, torch.cuda.current_stream(tensor.device).record_event())


@contextmanager
def _own_stream(device: torch.device, caller_event: Any) -> Iterator[None]:
    if device not in _thread_streams.by_device:
        _thread_streams.by_device[device] = torch.cuda.Stream(device)
    stream = _thread_streams.by_device[device]
    with torch.cuda.stream(stream), foreign_stream(stream.cuda_stream, device.index):
        stream.wait_event(caller_event)
        try:
            yield
        finally:
            stream.synchronize()


def copy_back(staged: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a result to where it belongs, unless it is there."""
    if staged is not target and staged.data_ptr() != target.data_ptr():
        with torch.no_grad():
            target.copy_(staged)
