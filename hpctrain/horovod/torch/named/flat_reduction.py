"""Reductions of flat tensors with factors, and the buffer in which tensors are fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from hpctrain.horovod.torch.named.adasum import adasum
from hpctrain.horovod.torch.named.requests import Request
from hpctrain.torch import collectives
from hpctrain.torch.modules.inputs import as_tensor
from hpctrain.torch.tensors import as_array
from hpctrain.world import World

Tensor: TypeAlias = torch.Tensor

#: Names of reductions by Horovod's names; Average divides afterwards.
REDUCTIONS = {"Average": "sum", "Sum": "sum", "Min": "min", "Max": "max", "Product": "prod"}
_MIN_BUFFER_BYTES = 1 << 20
_MAX_BOUND_CALLS = 1024


class FlatReduction:
    """Reduces flat tensors over the ranks of a World."""

    def __init__(self, world: World, is_ordered: bool):
        """`is_ordered`: whether sums are added in the order of ranks."""
        self._group, self._memory, self._is_ordered = world.main, world.memory, is_ordered
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._bound_calls: dict[Any, Callable[[], Any]] = {}

    def reduce(self, flat: Tensor, request: Request) -> None:
        """Reduce contiguous `flat` over all ranks, with the factors of `request`."""
        if request.op == "Average" and is_narrow(flat):  # the sum may need more bits
            wide = flat.to(torch.int32)
            self.reduce(wide, request)
            flat.copy_(wide)
            return
        size = self._group.link.size
        scale(flat, request.prescale)
        if request.op == "Adasum":
            adasum(self._group, flat)
        elif size > 1:
            self._bound_call(flat, REDUCTIONS[request.op])()
        finish_reduction(flat, request, size)

    def _bound_call(self, flat: Tensor, name: str) -> Callable[[], Any]:
        """Return the all-reduce of the memory of `flat`."""
        key = flat.data_ptr(), flat.numel(), flat.dtype, name
        if (call := self._bound_calls.get(key)) is None:
            if len(self._bound_calls) >= _MAX_BOUND_CALLS:
                self._bound_calls.clear()
            x = as_array(flat)
            call = collectives.bind_all_reduce(self._group, x, name, self._is_ordered, None)
            self._bound_calls[key] = call
        return call

    def buffer(self, nbytes: int, like: Tensor) -> Tensor:
        """Return `nbytes` of memory on the device of `like`; on the host, neighbours map it.

        Its allocation is collective, so all ranks must ask for the same lengths.
        """
        if like.is_cuda:
            return like.new_empty(nbytes, dtype=torch.uint8)
        if self._buffer.numel() < nbytes:
            length = max(_MIN_BUFFER_BYTES, 1 << (nbytes - 1).bit_length())
            with torch.inference_mode(mode=False):  # the buffer serves all later operations
                self._buffer = as_tensor(self._memory.zeros(length, np.uint8))
            self._bound_calls.clear()  # other arrays may lie where the buffer was
        return self._buffer[:nbytes]


def is_narrow(tensor: Tensor) -> bool:
    """Return whether elements are integers of less than 32 bits."""
    return tensor.element_size() < 4 and not tensor.is_floating_point()


def finish_reduction(total: Tensor, request: Request, size: int) -> None:
    """Divide a sum over `size` ranks if the mean is wanted; scale the result."""
    if request.op == "Average":
        is_integer = not (total.is_floating_point() or total.is_complex())
        if is_integer and request.postscale != 1.0:
            total.copy_(total.double().mul_(request.postscale).div_(size))
            return
        total.div_(size, rounding_mode="trunc" if is_integer else None)
    scale(total, request.postscale)


def scale(flat: Tensor, factor: float) -> None:
    """Multiply `flat`; integers as float64, rounded toward zero."""
    if factor == 1.0:
        return
    if flat.is_floating_point() or flat.is_complex():
        flat.mul_(factor)
    else:
        flat.copy_(flat.double().mul_(factor))
