"""Point-to-point messages of `torch.distributed`: posted at once, in no order with collectives.

MPI is given memory of the host alone: a tensor of CUDA is copied to the host before its send is
posted, and from the host when the receive is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from hpctrain.torch.operations import Operations
from hpctrain.torch.tensors import as_bytes
from hpctrain.torch.work import MessageWork
from hpctrain.transport.mpi.tagged import ANY_RANK

Tensors: TypeAlias = Sequence[torch.Tensor]


class PointToPoint(Operations):
    """See `torch.distributed.ProcessGroup`."""

    def send(self, tensors: Tensors, dest: int, tag: int) -> Any:
        """Send the tensor to rank `dest`."""
        source = tensors[0].contiguous().cpu()  # waits for the caller's stream on a GPU
        request = self.communicator.messages.isend(as_bytes(source), dest, tag)
        return MessageWork(request, source, source, self.communicator)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Any:
        """Fill the tensor from rank `source`."""
        target = tensors[0]
        on_host = torch.empty(target.shape, dtype=target.dtype) if target.is_cuda else target
        staged = on_host.contiguous()
        request = self.communicator.messages.irecv(as_bytes(staged), source, tag)
        return MessageWork(request, staged, target, self.communicator)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        """Fill the tensor from whichever rank sends with this tag."""
        return self.recv(tensors, ANY_RANK, tag)
