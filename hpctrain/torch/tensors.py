"""Tensors as arrays: the same memory, without a copy.

An alias is made from the address: `tensor.numpy()` would fix the size of the storage for ever, and
FSDP resizes storages. So an alias does not keep its tensor alive: who uses it must.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import array_at

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


def copy_back(staged: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a result to where it belongs, unless it is there."""
    if staged is not target and staged.data_ptr() != target.data_ptr():
        with torch.no_grad():
            target.copy_(staged)


def copy_all_back(staged: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy each result to its target."""
    for source, target in zip(staged, targets, strict=True):
        copy_back(source, target)
