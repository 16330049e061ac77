"""Samples of arrays as arguments of a module, and its outputs as arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from hpctrain.core.trees import map_arrays
from hpctrain.core.xp import on_device


def call_module(module: torch.nn.Module, x: Any, like: torch.Tensor, has_embedding: bool) -> Any:
    """Return `module(x)`, `module(**x)` for a dict or `module(*x)` for a tuple.

    Floating-point arrays become tensors of the dtype and device of `like`; so do integers, unless
    the module has an embedding, which needs int64. Booleans stay what they are.
    """
    x = map_arrays(partial(_input, like=like, has_embedding=has_embedding), x)
    if isinstance(x, dict):
        return module(**x)
    return module(*x) if isinstance(x, tuple) else module(x)


def as_targets(y: Any, like: torch.Tensor) -> Any:
    """Return the tree of targets as tensors: integers as int64, floats in the dtype of `like`."""
    return map_arrays(partial(_input, like=like, has_embedding=True), y)


def as_tensor(x: Any) -> torch.Tensor:
    """Return a tensor in the memory of array `x`, of the host or of a device."""
    if on_device(x):
        tensor = torch.as_tensor(_of_known_dtype(x), device=f"cuda:{x.device.id}")
    else:
        tensor = torch.from_numpy(_of_known_dtype(x))
    return tensor.view(torch.bfloat16) if _is_bfloat16(x) else tensor


def _of_known_dtype(x: Any) -> Any:
    """Return array `x`, as integers if it is of bfloat16, which PyTorch takes from no array."""
    return x.view(np.int16) if _is_bfloat16(x) else x


def _is_bfloat16(x: Any) -> bool:
    return x.dtype.kind == "V" and x.dtype.name == "bfloat16"  # a name takes microseconds


def as_arrays(outputs: Any) -> Any:
    """Return the tree of tensors as arrays of the host; bfloat16 as float32."""
    return map_arrays(as_host_array, outputs)


def as_host_array(x: torch.Tensor) -> np.ndarray:
    """Return tensor `x` as an array of the host; bfloat16 as float32."""
    x = x.detach().cpu()
    return (x.float() if x.dtype is torch.bfloat16 else x).numpy()


def _input(x: Any, like: torch.Tensor, has_embedding: bool) -> torch.Tensor:
    dtype = like.dtype
    if x.dtype.kind == "b":
        dtype = torch.bool
    elif x.dtype.kind in "iu" and has_embedding:
        dtype = torch.int64
    return as_tensor(x).to(like.device, dtype)
