"""Synchronous data parallelism: every rank holds all parameters, gradients are summed.

    g_i = dL/dw on rank i's share      g = g_1 + ... + g_P  (all-reduce)      w <- w - update(g)

Every rank makes the same update from the same bytes, so the replicas stay equal. Sent per rank
and step: 2n(P-1)/P bytes with a ring, n being the bytes of the parameters. With `shard_optimizer`
each rank makes 1/P of the update, for as many bytes; see `update.py`. Source: Goyal et al.,
"Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

from hpctrain import config
from hpctrain.checkpoint import Piece
from hpctrain.collectives import Group
from hpctrain.collectives.nccl import communicator_for, nccl
from hpctrain.collectives.vote import elementwise_maximum
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import on_device
from hpctrain.engines.engine import (
    Flags,
    Task,
    Times,
    Work,
    broadcast_replica,
    sum_in_layer,
    sum_over,
    train_in_lockstep,
)
from hpctrain.engines.saved_state import SavedState
from hpctrain.engines.synchronous import compression_state, overlap
from hpctrain.engines.synchronous.contradictions import contradictions
from hpctrain.engines.synchronous.node_shared_params import NodeSharedUpdate
from hpctrain.engines.synchronous.ordered_sums import make_gradient_sums
from hpctrain.engines.synchronous.overlap import DeferredUpdate
from hpctrain.engines.synchronous.single import Single, SingleEngine
from hpctrain.engines.synchronous.update import PartwiseUpdate, ReplicatedUpdate, ShardedUpdate
from hpctrain.gradients import compress
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.reducer import Reducer, WireOptions
from hpctrain.gradients.replica import Replica, ignore_ready
from hpctrain.nn import Sums
from hpctrain.optim import Optimizer
from hpctrain.tuning.select import auto, find_all_gather
from hpctrain.world import World


@config.options
class AllReduce(WireOptions):
    """How gradients are summed; in a recipe the keys of WireOptions are those of `[wire]`."""

    shard_optimizer: bool = False  #: each rank keeps 1/P of the optimizer's state
    share_parameters: bool = False  #: all ranks of a node have one array of parameters

    def __post_init__(self) -> None:
        """Refuse options that contradict each other or the method of compression."""
        super().__post_init__()
        if self.reduction == "ordered":
            find_all_gather(self.algorithm)  # raises an error if there is none
        for conflict, message in contradictions(self):
            if conflict:
                raise UsageError(message)

    def build(
        self, world: World, replica: Replica, optimizer: Optimizer
    ) -> AllReduceEngine | SingleEngine:
        """Return this rank's engine, SingleEngine for one rank; collective."""
        if world.size == 1:
            single_options = Single(reduction=self.reduction, blocks=self.blocks)
            return single_options.build(world, replica, optimizer)
        return AllReduceEngine(world, replica, optimizer, self)


class AllReduceEngine:
    """See `hpctrain.engines.engine.Engine`."""

    name = "allreduce"
    servers = 0
    asynchronous = False
    updates_per_step = 1.0
    recorder = None
    staleness = None

    def __init__(self, world: World, replica: Replica, optimizer: Optimizer, options: AllReduce):
        _check_priority(optimizer, options)
        _check_on_host(replica, options)
        _broadcast_replica(world, replica, options)
        self.times, self.algorithm = Times(), options.algorithm
        self.workers, self.worker = world.size, world.rank
        self._trace, self._group = world.trace, world.main
        self._join_flags(Flags())  # allocates the buffers of votes before the first step
        self._sums = make_gradient_sums(replica, options, world.rank, world.size)
        self.replica = self._sums.replica
        self.check = GradientCheck(self.replica, world.size, self._sums.parts)
        self._wire: Group | None = None  # of the communication thread
        self._compressor = compress.build(
            options, self._sums.allreduce, replica.arena, world.size, world.memory.zeros_like
        )
        self._deferred_update: DeferredUpdate | None = None
        #: The range of the sums that this rank checks; None: it checks its own gradient.
        self._checked_range: slice | None = None
        self._reducer: Reducer | NodeSharedUpdate
        self.update: ReplicatedUpdate | ShardedUpdate | NodeSharedUpdate
        if options.share_parameters:
            self.update = NodeSharedUpdate(
                world, replica, optimizer, self._sums.allreduce, self.times
            )
            self._reducer = self.update
        else:
            self._init_buckets(world, optimizer, options)

    def _init_buckets(self, world: World, optimizer: Optimizer, options: AllReduce) -> None:
        """Create the reducer and the update of gradients summed in buckets; collective."""
        arena, sums, times, trace = self.replica.arena, self._sums, self.times, world.trace
        self.update = (
            ShardedUpdate(self._group, arena, optimizer, times, trace, sums.reduce_scatter)
            if options.shard_optimizer
            else ReplicatedUpdate(self._group, arena, optimizer, self._compressor or sums.allreduce)
        )
        concurrent = overlap.uses_thread(world, options)
        wire = self._wire = world.group_for("wire", alone=not concurrent)
        if sums.allreduce is nccl:
            communicator_for(wire, arena.grad)  # now, while a failure can still be reported
        overlap.sleep_while_waiting(wire, concurrent)
        buckets = overlap.choose_buckets(arena, wire, options, concurrent)
        reduce = overlap.prefer_shared_sum(self.update.reduce, wire, arena.grad, buckets, options)
        self._reducer = Reducer(
            arena.grad,
            buckets,
            wire,
            reduce,
            concurrent,
            trace,
            options.priority,
            self.check.on_bucket,
        )
        if options.priority:
            parts = [slice(bucket.start, bucket.stop) for bucket in buckets]
            update = PartwiseUpdate(optimizer, self.update.state, arena.param, arena.slots, parts)
            names = [slot.name for slot in arena.slots]
            self._deferred_update = DeferredUpdate(world, self._reducer, update, names, times)
        elif self._compressor is None and not on_device(arena.grad):
            self._checked_range = self.update.own
        if self.update.reduce is auto:
            self.algorithm = f"auto ({', '.join(dict.fromkeys(self._reducer.algorithms))})"

    def train(self, work: Work, start: int, until: int) -> tuple[int, Flags]:
        """Train from step `start` to `until`."""
        return train_in_lockstep(self, work, start, until)

    def step(self, task: Task, flags: Flags) -> tuple[Sums, Flags]:
        """Sum the gradients of all shares while backward runs, and update with the sum."""
        times, add = self.times, self._trace.add
        on_need = self._deferred_update.apply_slot if self._deferred_update else None
        key = task.key._replace(sum_over_ranks=self._sum_in_layer, on_need=on_need)
        with times.compute(self._trace, "forward, backward"):
            if self._compressor is not None:
                self._compressor.begin()
            ready = self.check.begin(
                self._reducer.mark_ready, check_slots=self._checked_range is None
            )
            sums = self.replica.gradient(task.batch, task.scale, key, ready)
            if not self.check.passes(sums):
                flags = flags.with_failure(self.worker)
        start_s = perf_counter()
        if self._checked_range is None:
            flags = self._join_flags(flags)
        sums = self._sums.step_sums(sums, self.sum)
        if self._deferred_update is not None and not flags.failed:
            times.wait_s += add("wait for flags", "wait", start_s, perf_counter())
            self._deferred_update.begin()
        else:
            flags = self._finish_step(start_s, flags)
        if flags.failed:
            self._undo_step()
            if self._checked_range is not None:
                flags = self._name_failing_rank(task._replace(key=key), flags)
        times.wire_s = self._reducer.wire_s
        return sums, flags

    def _finish_step(self, start_s: float, flags: Flags) -> Flags:
        """Wait for all sums, and update with them unless the step has failed."""
        gradient = self._reducer.wait()
        if self._checked_range is not None:
            passes = self.check.sum_passes(gradient[self._checked_range])
            flags = self._join_flags(flags if passes else flags.with_failure(self.worker))
        waits = self._trace.add("wait for gradients", "wait", start_s, perf_counter())
        self.times.wait_s += waits
        with self.times.compute(self._trace, "update"):
            finite = self._compressor is None or self._compressor.sums_are_finite()
            if not flags.failed and not finite:  # on all ranks: they hold the same sum
                self.check.fault = compression_state.find_sum_fault(self._compressor)
                flags = flags.with_failure(self.workers)
            if not flags.failed:
                self.update(gradient)
            self._reducer.release()
        return flags

    def _name_failing_rank(self, task: Task, flags: Flags) -> Flags:
        """Return `flags` with the rank whose own gradient makes the sum not finite; collective.

        The sum was written over the gradients, so all ranks compute theirs once more.
        """
        ready = self.check.begin(ignore_ready)
        key = task.key._replace(recomputed=True)
        sums = self.replica.gradient(task.batch, task.scale, key, ready)
        own_flags = flags._replace(failed=0)
        own_flags = self._join_flags(
            own_flags if self.check.passes(sums) else own_flags.with_failure(self.worker)
        )
        self.check.undo()
        if own_flags.failed:
            return own_flags
        self.check.fault = "the sum of gradients is not finite"  # of one with a random state
        return flags.with_failure(self.workers)

    def _undo_step(self) -> None:
        """Restore the state from before a step whose sum was not applied."""
        self.check.undo()
        if self._compressor is not None:
            self._compressor.undo()

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent since the start."""
        return self._group.bytes_sent + (self._wire.bytes_sent if self._wire else 0)

    def sum(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sums of a few float64 over all ranks, the same on each."""
        return sum_over(self._group, numbers)

    def _sum_in_layer(self, numbers: np.ndarray) -> np.ndarray:
        # On the main link; the wire thread has its own: each keeps its order on all ranks.
        return sum_in_layer(self._group, numbers, self.times, self._trace)

    def settle(self) -> None:
        """Apply the sums not applied yet; then all ranks hold the same parameters."""
        if self._deferred_update is not None:
            self._deferred_update.finish()

    def state(self) -> list[Piece]:
        """Return this rank's part of the state."""
        link = self._group.link
        return self.update.pieces() + compression_state.pieces(
            self._compressor, link.rank, link.size
        )

    def load(self, saved: SavedState) -> None:
        """Request this rank's part of the state."""
        self.update.load(saved)
        link = self._group.link
        compression_state.load(self._compressor, saved, link.rank, link.size)

    def close(self) -> None:
        """End the communication thread and free its link; collective."""
        self._reducer.close()
        if self._wire is not None:
            self._wire.free()

    def _join_flags(self, flags: Flags) -> Flags:
        return Flags(*elementwise_maximum(self._group, flags))


def _check_priority(optimizer: Optimizer, options: AllReduce) -> None:
    if options.priority and optimizer.needs_norms:
        raise UsageError(
            "[wire] priority: parameters are updated bucket by bucket; expected an optimizer "
            "that needs no norm of whole tensors, seen lars, lamb or clip_norm"
        )


def _check_on_host(replica: Replica, options: AllReduce) -> None:
    """Raise UsageError for an option that needs gradients in the memory of the host."""
    if options.share_parameters and on_device(replica.arena.grad):
        raise UsageError(
            "[engine] share_parameters: expected device = 'cpu'; not yet available on a GPU"
        )


def _broadcast_replica(world: World, replica: Replica, options: AllReduce) -> None:
    """Move gradients to memory shared with neighbours; broadcast the parameters of rank 0."""
    grad = replica.arena.grad
    replica.move(grad=world.memory.zeros_like(grad))
    broadcast_replica(world, replica, str(options))
