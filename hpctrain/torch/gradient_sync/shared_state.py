"""What all ranks of a loop of the user's own take from rank 0: parameters, buffers, optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import torch

from hpctrain.collectives import Group, broadcast
from hpctrain.collectives.small_messages import is_any
from hpctrain.torch.tensors import as_bytes, copy_back, own_stream
from hpctrain.world import World


def broadcast_state(
    world: World, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:
    """Copy parameters, buffers and the optimizer's state of rank 0 to all ranks; collective.

    Raises UsageError on all ranks if they are not alike.
    """
    tensors = [*model.parameters(), *model.buffers(), *_state_of(optimizer)]
    layout = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    world.must_agree(str(layout), "the buffers and the optimizer's state of ht.torch.sync")
    for tensor in tensors:
        broadcast_tensor(world.main, tensor)


def _state_of(optimizer: torch.optim.Optimizer | None) -> Iterable[torch.Tensor]:
    if optimizer is None:
        return
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state.get(parameter, {})
        yield from (state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor))


def broadcast_new(world: World, tensors: Sequence[torch.Tensor]) -> bool:
    """Broadcast rank 0's `tensors`; return whether any rank's tensors differed; collective."""
    old_digests = [_digest(tensor) for tensor in tensors]
    for tensor in tensors:
        broadcast_tensor(world.main, tensor)
    differs = old_digests != [_digest(tensor) for tensor in tensors]
    return is_any(world.link, differs)


def broadcast_tensor(group: Group, tensor: torch.Tensor) -> None:
    """Broadcast rank 0's tensor, in place and in any layout."""
    dense = tensor.detach().contiguous()
    with own_stream(dense):
        broadcast(group, as_bytes(dense))
    copy_back(dense, tensor)


def broadcast_buffers(group: Group, buffers: Sequence[torch.Tensor]) -> None:
    """Broadcast rank 0's buffers, in one message per dtype and device."""
    for kind in sorted({kind_of(buffer) for buffer in buffers}):
        kind_buffers = [buffer for buffer in buffers if kind_of(buffer) == kind]
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in kind_buffers])
        broadcast_tensor(group, flat)
        if group.link.rank > 0:
            values = flat.split([buffer.numel() for buffer in kind_buffers])
            with torch.no_grad():
                for buffer, value in zip(kind_buffers, values, strict=True):
                    buffer.copy_(value.reshape(buffer.shape))


def kind_of(tensor: torch.Tensor) -> tuple[str, str]:
    """Return the dtype and device of a tensor: each message, or plane, has one of them."""
    return str(tensor.dtype), str(tensor.device)


def _digest(tensor: torch.Tensor) -> bytes:
    on_host = tensor.detach().cpu().contiguous()
    return blake2b(as_bytes(on_host).tobytes(), digest_size=16).digest()
