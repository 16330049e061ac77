"""Casts of gradients to 16 bits before they are reduced, and back: `Compression`."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """A pair of functions around a reduction; a compressor of a user's own overrides both."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to be reduced, and the context that `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the reduced tensor in its original form."""
        return tensor


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""


class FP16Compressor(Compressor):
    """Casts floating-point tensors to float16; a sum beyond 65,504 becomes infinite."""

    wire_dtype = torch.float16

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Return the tensor in the type of the wire, and its original dtype."""
        if not tensor.dtype.is_floating_point:
            return tensor, tensor.dtype
        return tensor.to(cls.wire_dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        """Return the tensor in the dtype `ctx`."""
        return tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Casts floating-point tensors to bfloat16, whose range is the range of float32."""

    wire_dtype = torch.bfloat16


class Compression:
    """The compressors that operations and `DistributedOptimizer` take as `compression`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
