"""Data parallelism for a loop of the user's own: `ht.torch.sync(model, optimizer)`.

    synced = ht.torch.sync(model, optimizer)
    for x, y in loader:                        # each rank reads its own samples
        optimizer.zero_grad()
        loss(model(x), y).backward()           # gradients are the means over all ranks
        optimizer.step()

As DistributedDataParallel, but the module is not wrapped: names of `state_dict()` stay the same,
and `.grad` of each parameter is a view of one plane per dtype:

    backward         layer 3   layer 2   layer 1   layer 0   end
    plane            grad / P, copied by a hook of each parameter; buckets are sent when all are in
    end of backward                                          wait for all sums

Ranks survive the loss of others where the job does (`hpctrain launch --elastic`):

    local gradients  ---sum---> mean      vote: all ranks have it, or all that are left sum again

Every rank keeps its own gradients until the vote, so that only those of a lost rank are missing.

Source: Li et al., "PyTorch distributed: experiences on accelerating data parallel training", 2020.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch.autograd import Variable

from hpctrain.collectives import broadcast
from hpctrain.core.allocator import keep_freed_memory
from hpctrain.core.errors import LostRankError, UsageError
from hpctrain.core.names import counted
from hpctrain.gradients.reducer import WireOptions
from hpctrain.torch.gradient_plane import GradientPlane, Parameters
from hpctrain.torch.job import start_job
from hpctrain.torch.tensors import as_bytes
from hpctrain.user_collectives.bound_calls import forget_calls
from hpctrain.world import World, survive

T = TypeVar("T")
log = logging.getLogger(__name__)


def sync(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    algorithm: str = "auto",
    bucket_bytes: Literal["auto"] | int = "auto",
    overlap: Literal["auto", "always", "never"] = "auto",
) -> GradientSync:
    """Let `backward` end with the mean gradient over all ranks in each `.grad`; collective.

    Starts MPI unless it is running. Parameters, buffers and the state of `optimizer` become those
    of rank 0. While `model` trains, each forward pass begins with the buffers of rank 0. Parameters
    that a loss does not depend on get the mean of the other ranks' gradients, or zeros. Options are
    those of `[wire]`. Raises UsageError on all ranks if models or options differ, and where
    `optimizer` holds parameters that are not the model's.

    In a job that survives the loss of ranks, a loss changes `world.rank` and `world.size`, and each
    call of `backward` ends with the mean over the ranks that are left; see `GradientSync.retry`.
    """
    options = WireOptions(algorithm=algorithm, bucket_bytes=bucket_bytes, overlap=overlap)
    return GradientSync(start_job(None), model, optimizer, options)


class GradientSync:
    """The gradients of one model, summed over all ranks during each backward pass."""

    def __init__(
        self,
        world: World,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        options: WireOptions,
    ):
        """Allocate the planes and register the hooks; collective. See `sync`."""
        keep_freed_memory()
        self.world = world
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        world.on_all_ranks(lambda: _check_optimizer(optimizer, parameters))
        layout = [(name, tuple(p.shape), str(p.dtype)) for name, p in parameters.items()]
        world.must_agree(f"{options}, {layout}", "the model and options of ht.torch.sync")
        for tensor in _tensors_to_broadcast(world, model, optimizer):
            _broadcast(world, tensor)
        self._handles: list[Any] = []
        self._planes: list[GradientPlane] = []
        self._is_syncing, self._has_local_gradients, self._in_backward = True, False, False
        if world.size == 1:
            return
        for dtype in sorted({p.dtype for p in parameters.values()}, key=str):
            own = {name: p for name, p in parameters.items() if p.dtype is dtype}
            plane = GradientPlane(world, own, options)
            self._planes.append(plane)
            for name, p in own.items():
                hook = partial(self._take_gradient, plane, name)
                self._handles.append(p.register_post_accumulate_grad_hook(hook))
        if any(True for _ in model.buffers()):
            self._handles.append(model.register_forward_pre_hook(self._broadcast_buffers))
        if optimizer is not None:
            self._handles.append(optimizer.register_step_pre_hook(self._check_step))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up the gradients of this rank alone, until a backward pass outside of this context.

        That sends the sum of them all.
        """
        self._is_syncing = False
        try:
            yield
        finally:
            self._is_syncing = True

    def close(self) -> None:
        """Remove the hooks and end the communication threads; gradients stay as they are."""
        for handle in self._handles:
            handle.remove()
        for plane in self._planes:
            plane.reducer.close()
        self._handles, self._planes = [], []

    def __enter__(self) -> GradientSync:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take_gradient(self, plane: GradientPlane, name: str, parameter: torch.Tensor) -> None:
        if not self._is_syncing:
            self._has_local_gradients = True
            return
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._finish_backward)
        plane.take(name)

    def _finish_backward(self) -> None:
        """Wait for the sums of all gradients."""
        self._in_backward = self._has_local_gradients = False
        for plane in self._planes:
            plane.take_remaining()
        self.retry(self._wait_for_sums)
        for plane in self._planes:
            plane.local.clear()

    def _wait_for_sums(self) -> None:
        for plane in self._planes:
            plane.reducer.wait()

    def retry(self, call: Callable[[], T]) -> T:
        """Return `call()`, made again after each loss of ranks, until all ranks left have returned.

        For collective calls of the user's own, such as `ht.allreduce` of an accuracy. Where ranks
        do not survive, this is `call()`.
        """
        if not self.world.survives:
            return call()
        while True:
            try:
                result = call()
                self.world.link.agree()
                return result
            except LostRankError:
                self._survive()

    def _survive(self) -> None:
        """Let the World and the planes go on with the ranks that are left; collective."""
        job = self.world.job
        assert job is not None
        numbers = job.numbers
        while True:
            try:
                for plane in self._planes:
                    plane.reducer.close()
                survive(self.world)
                for plane in self._planes:
                    plane.build(self.world)
                break
            except LostRankError:
                continue
        forget_calls()
        lost = [number for number in numbers if number not in job.numbers]
        if lost and self.world.rank == 0:
            names = ", ".join(f"{number} ({job.places[number].node})" for number in lost)
            ranks = counted(self.world.size, "rank")
            log.warning("lost rank %s; the loop goes on with %s", names, ranks)

    def _broadcast_buffers(self, module: torch.nn.Module, inputs: Any) -> None:
        """Let each rank have the buffers of rank 0."""
        if module.training and torch.is_grad_enabled() and self._is_syncing:
            self.retry(partial(self._copy_from_rank_0, list(module.buffers())))

    def _copy_from_rank_0(self, buffers: list[torch.Tensor]) -> None:
        for dtype in sorted({b.dtype for b in buffers}, key=str):
            own = [b for b in buffers if b.dtype is dtype]
            flat = torch.cat([b.detach().reshape(-1) for b in own])
            _broadcast(self.world, flat)
            if self.world.rank > 0:
                for buffer, values in zip(own, flat.split([b.numel() for b in own]), strict=True):
                    buffer.copy_(values.reshape(buffer.shape))

    def _check_step(self, *_: Any) -> None:
        if self._has_local_gradients:
            raise UsageError(
                "ht.torch.sync: optimizer.step() after gradients under no_sync() alone: each rank "
                "would make a step of its own; call backward() of the last part outside of no_sync"
            )


def _check_optimizer(optimizer: torch.optim.Optimizer | None, parameters: Parameters) -> None:
    """Raise UsageError for parameters of `optimizer` that are not summed."""
    if not parameters:
        raise UsageError("ht.torch.sync: expected parameters with requires_grad, seen none")
    groups = optimizer.param_groups if optimizer is not None else []
    known_ids = {id(p) for p in parameters.values()}
    unknown = [p for group in groups for p in group["params"] if id(p) not in known_ids]
    if unknown and any(p.requires_grad for p in unknown):
        raise UsageError(
            f"ht.torch.sync: the optimizer holds {len(unknown)} parameters that the model does not "
            "have, so that no gradient of them would be summed; build it with model.parameters()"
        )


def _tensors_to_broadcast(
    world: World, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterable[torch.Tensor]:
    """Return all tensors that ranks share; raise UsageError on all if they are not alike."""
    tensors = [*model.parameters(), *model.buffers()]
    if optimizer is not None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        states = [optimizer.state[p] for p in params if p in optimizer.state]
        values = [state[key] for state in states for key in sorted(state)]
        tensors += [value for value in values if isinstance(value, torch.Tensor)]
    layout = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    world.must_agree(str(layout), "the buffers and the optimizer's state of ht.torch.sync")
    return tensors


def _broadcast(world: World, tensor: torch.Tensor) -> None:
    """Copy rank 0's tensor, of any layout, into those of all ranks."""
    dense = tensor.detach().contiguous()
    broadcast(world.main, as_bytes(dense))
    if dense.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(dense)
