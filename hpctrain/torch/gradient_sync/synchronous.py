"""Data parallelism for a loop of the user's own: `ht.torch.sync(model, optimizer)`.

    synced = ht.torch.sync(model, optimizer)
    for x, y in loader:                        # each rank reads its own samples
        optimizer.zero_grad()
        loss(model(x), y).backward()           # gradients are the means over all ranks
        optimizer.step()

As DistributedDataParallel, but the module is not wrapped: names of `state_dict()` stay the same,
and `.grad` of each parameter is a view of the plane of its dtype:

    forward          the trained parameters are compared with the previous pass; buffers
    backward         layer 3   layer 2   layer 1   layer 0   end
    plane            grad / P, copied by a hook of each parameter; buckets are sent when all are in
    end of backward                                          wait for all sums

In an elastic job (`hpctrain launch --elastic`) training goes on after a loss of ranks:

    local gradients  ---sum---> mean      vote: all ranks have it, or all that are left sum again

Every rank keeps its own gradients until the vote, so that a loss costs the lost rank's gradients
alone.

Source: Li et al., "PyTorch distributed: experiences on accelerating data parallel training", 2020.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch.autograd import Variable

from hpctrain.core.allocator import keep_freed_memory
from hpctrain.core.errors import LostRankError, UsageError
from hpctrain.core.names import counted
from hpctrain.gradients.reducer import WireOptions
from hpctrain.torch.gradient_sync.gradient_plane import Totals
from hpctrain.torch.gradient_sync.module_hooks import ForwardHook, while_lives
from hpctrain.torch.gradient_sync.planes import GradientPlanes
from hpctrain.torch.gradient_sync.shared_state import broadcast_buffers, broadcast_state
from hpctrain.torch.gradient_sync.trained import TrainedSet
from hpctrain.torch.job import go_on_after_loss, start_job
from hpctrain.watch.ended import GRADIENTS, GRADIENTS_CALL
from hpctrain.watch.inside import ALL_RANKS
from hpctrain.world import World

T = TypeVar("T")


def sync(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    algorithm: str = "auto",
    bucket_bytes: Literal["auto"] | int = "auto",
    overlap: Literal["auto", "always", "never"] = "auto",
) -> GradientSync:
    """Let `backward` end with the mean gradient over all ranks in each `.grad`; collective.

    Starts MPI unless it is running. Broadcasts rank 0's parameters, buffers and optimizer state.
    While `model` trains, the first forward pass after each backward pass begins with rank 0's
    buffers. The table `[wire]` of a recipe has the same options.

    As DDP with `find_unused_parameters=True`: a parameter that the loss of no rank depends on keeps
    the gradient None; where some ranks have a gradient, the others count as zeros. Parameters may
    be frozen, unfrozen, added and replaced on all ranks alike: the next backward pass follows, and
    rank 0 broadcasts new ones. Sparse gradients become dense. A backward pass that fails
    leaves no gradients; the next one works if it failed on all ranks.

    Raises UsageError on all ranks if models, trained parameters or options differ, where
    `optimizer` holds parameters that are not the model's, and for lazy parameters.

    In a job that survives the loss of ranks, a loss changes `world.rank` and `world.size`, and each
    call of `backward` ends with the mean over the ranks that are left; see `GradientSync.retry`.
    """
    options = WireOptions(algorithm=algorithm, bucket_bytes=bucket_bytes, overlap=overlap)
    return GradientSync(start_job(None), model, optimizer, options)


class GradientSync:
    """The gradients of a model, summed over all ranks during each backward pass."""

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
        world.must_agree(str(options), "the options of ht.torch.sync")
        self._trained = TrainedSet(world, model, optimizer)
        broadcast_state(world, model, optimizer)
        self._handles: list[Any] = []
        self._is_syncing, self._has_local_gradients = True, False
        #: the end of the backward pass under way; dead if that pass failed
        self._pending: weakref.ref[Callable[[], None]] | None = None
        self._planes = GradientPlanes(options)
        self._takes_buffers = True  # before the next forward pass
        if world.size == 1:
            return
        self._model, self._buffers_group = weakref.ref(model), world.threads.group_for(GRADIENTS)
        self._planes.build(world, self._trained.parameters)
        self._trained.watch(while_lives(self, GradientSync.take_gradient))
        before_forward = ForwardHook(GradientSync._begin_forward, self)
        self._handles.append(model.register_forward_pre_hook(before_forward))
        if optimizer is not None:
            self._handles.append(optimizer.register_step_pre_hook(self._check_step))
        weakref.finalize(model, _release, self).atexit = False  # lives as long as the model

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up the gradients of this rank alone, until a backward pass outside of this context.

        That pass sends the accumulated gradients.
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
        self._handles = []
        self._trained.unwatch()
        self._planes.close()

    def __enter__(self) -> GradientSync:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin_forward(self) -> None:
        """Follow what is trained, and take the buffers of rank 0 once per backward pass.

        Not in each forward pass: a graph that is not yet used may hold the buffers.
        """
        model = self._model()
        if model is None or not torch.is_grad_enabled():
            return
        self._trained.note()
        if model.training and self._is_syncing and self._takes_buffers:
            self._takes_buffers = False
            buffers = list(model.buffers())
            self.retry(lambda: broadcast_buffers(self._buffers_group, buffers))

    def take_gradient(self, parameter: torch.Tensor) -> None:
        """Collect the complete gradient of `parameter`, whose mean over the ranks then follows."""
        if not self._is_syncing:
            self._has_local_gradients = True
            return
        if self._pending is None or self._pending() is None:
            self._begin_backward()
        self._planes.collect_gradient(parameter)

    def _begin_backward(self) -> None:
        if self._pending is not None:
            self._pending = None  # a failed pass is forgotten
            if not self._planes.drop_gradients():  # a part was sent: other ranks wait for the rest
                self._planes.finish(has_failed=True)
                self.retry(self._wait_for_sums)
                _check_whole(self._planes.totals())
                self._planes.drop_gradients()
        end = partial(self._finish_backward)
        self._pending = weakref.ref(end)  # autograd drops it if the pass fails
        Variable._execution_engine.queue_callback(end)

    def _finish_backward(self) -> None:
        """Wait until every gradient is summed."""
        self._pending, self._has_local_gradients = None, False
        self._takes_buffers = True
        self._planes.finish(is_changed=self._trained.has_changed())
        self.retry(self._wait_for_sums)
        totals = self._planes.totals()
        _check_whole(totals)
        if totals.late:
            earlier_sums = self._planes.send_late()
            self.retry(self._wait_for_sums)
            self._planes.add_sums(earlier_sums)
        self._planes.give_gradients()
        if totals.changed:
            self.retry(self._trained.agree)
            if not self._planes.hold(self._trained.parameters):
                self._build()  # gradients of new parameters are summed, means stay as they are
                self._planes.finish()
                self.retry(self._wait_for_sums)
                self._planes.give_gradients()
        elif self._trained.may_shrink(len(self._planes.parameters)):
            self._build()

    def _build(self) -> None:
        self.retry(lambda: self._planes.build(self.world, self._trained.parameters))

    def _wait_for_sums(self) -> None:
        entry = (
            None
            if self.world.threads.record is None
            else self.world.threads.record.entry(GRADIENTS)
        )
        if entry is not None:
            entry.enter(GRADIENTS_CALL, ALL_RANKS, self._planes.nbytes)
        try:
            with self.world.trace.span("wait for gradients", "wait"):
                self._planes.wait()
        finally:
            if entry is not None:
                entry.leave()

    def retry(self, call: Callable[[], T]) -> T:
        """Return `call()`, made again after each loss of ranks, until all ranks left have returned.

        For collective calls of the user's own, such as `ht.allreduce` of an accuracy. Where ranks
        do not survive, this is `call()`.
        """
        if self.world.job is None:
            return call()
        while True:
            try:
                result = call()
                self.world.link.endpoint.survivors.agree()
                return result
            except LostRankError:
                self._survive()

    def _survive(self) -> None:
        """Let the World and the planes go on with the ranks that are left; collective."""

        def rebuild() -> None:
            self._buffers_group = self.world.threads.group_for(GRADIENTS)
            self._planes.rebuild(self.world)

        go_on_after_loss(self.world, self._planes.close, rebuild, "the loop")

    def _check_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._has_local_gradients:
            raise UsageError(
                "ht.torch.sync: optimizer.step() after gradients under no_sync() alone: each rank "
                "would make a step of its own; call backward() of the last part outside of no_sync"
            )
        params = (p for group in optimizer.param_groups for p in group["params"])
        if any(p.grad is not None and p.requires_grad and not self._planes.has(p) for p in params):
            raise UsageError(
                "ht.torch.sync: optimizer.step() with gradients that were not summed, of "
                "parameters that were added or unfrozen: let a forward pass begin with model(...)"
            )


def _release(owner: GradientSync) -> None:
    """Hold `owner` as long as a finalizer with it."""


def _check_whole(totals: Totals) -> None:
    """Raise UsageError on all ranks if backward failed on some."""
    if totals.failed and totals.whole:
        raise UsageError(
            f"ht.torch.sync: backward() failed on {counted(totals.failed, 'rank')} of "
            f"{totals.failed + totals.whole} and went on elsewhere, so that there is no mean "
            "gradient; where errors are caught, all ranks must leave out the same step"
        )
