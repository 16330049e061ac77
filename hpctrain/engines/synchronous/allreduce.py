"""Synchronous data parallelism: every rank holds all parameters, gradients are summed.

    g_i = dL/dw on rank i's share      g = g_1 + ... + g_P  (all-reduce)      w <- w - update(g)

Every rank makes the same update from the same bytes, so the replicas stay equal. Sent per rank
and step: 2n(P-1)/P bytes with a ring, n being the bytes of the parameters. With `shard_optimizer`
each rank makes 1/P of the update, for as many bytes; see `update.py`. Source: Goyal et al.,
"Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

import numpy as np

from hpctrain import config
from hpctrain.checkpoint import Piece
from hpctrain.collectives import Group, broadcast
from hpctrain.collectives.nccl import communicator, nccl
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.collectives.vote import largest
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import on_device
from hpctrain.engines.engine import Flags, Task, Times, Work, ignore_ready, in_step
from hpctrain.engines.synchronous import compression_state, overlap
from hpctrain.engines.synchronous.contradictions import contradictions
from hpctrain.engines.synchronous.node_shared_params import Shared
from hpctrain.engines.synchronous.ordered_sums import sums_of
from hpctrain.engines.synchronous.overlap import AsNeeded
from hpctrain.engines.synchronous.single import Single, SingleEngine
from hpctrain.engines.synchronous.update import InParts, Replicated, Sharded
from hpctrain.gradients import compress
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.reducer import Reducer, WireOptions
from hpctrain.gradients.replica import Replica
from hpctrain.nn import Sums
from hpctrain.optim import Optimizer
from hpctrain.tuning.select import all_gather_named, auto
from hpctrain.world import World


@config.options
class AllReduce(WireOptions):
    """How gradients are summed; a recipe gives the keys that are WireOptions' in `[wire]`."""

    shard_optimizer: bool = False  #: each rank keeps 1/P of the optimizer's state
    share_parameters: bool = False  #: all ranks of a node have one array of parameters

    def __post_init__(self) -> None:
        """Refuse options that contradict each other or the method of compression."""
        super().__post_init__()
        if self.reduction == "ordered":
            all_gather_named(self.algorithm)  # some cannot
        for conflict, message in contradictions(self):
            if conflict:
                raise UsageError(message)

    def build(
        self, world: World, replica: Replica, optimizer: Optimizer
    ) -> AllReduceEngine | SingleEngine:
        """Return this rank's engine; collective. Alone there is nothing to sum."""
        if world.size == 1:
            alone = Single(reduction=self.reduction, blocks=self.blocks)
            return alone.build(world, replica, optimizer)
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
        _must_take_buckets(optimizer, options)
        _must_be_on_cores(replica, options)
        _same_start(world, replica, options)
        self.times, self.algorithm = Times(), options.algorithm
        self.workers, self.worker = world.size, world.rank
        self._trace, self._group = world.trace, world.main
        self._vote(Flags())  # sets up the buffers of votes now: no step pays for it
        self._sums = sums_of(replica, options, world.rank, world.size)
        self.replica = self._sums.replica
        self.check = GradientCheck(self.replica, world.size, self._sums.parts)
        self._wire: Group | None = None  # of the communication thread
        self._compressor = compress.build(
            options, self._sums.allreduce, replica.arena, world.size, world.memory.zeros_like
        )
        self._as_needed: AsNeeded | None = None
        #: The range of the sums that this rank checks; None where it checks its own gradient.
        self._own_sum: slice | None = None
        self._reducer: Reducer | Shared
        self.update: Replicated | Sharded | Shared
        if options.share_parameters:
            self.update = Shared(world, replica, optimizer, self._sums.allreduce, self.times)
            self._reducer = self.update
        else:
            self._update_in_buckets(world, optimizer, options)

    def _update_in_buckets(self, world: World, optimizer: Optimizer, options: AllReduce) -> None:
        """Make the update of gradients that are summed bucket by bucket; collective."""
        arena, sums, times, trace = self.replica.arena, self._sums, self.times, world.trace
        self.update = (
            Sharded(self._group, arena, optimizer, times, trace, sums.reduce_scatter)
            if options.shard_optimizer
            else Replicated(self._group, arena, optimizer, self._compressor or sums.allreduce)
        )
        concurrent = overlap.pays(world, options)
        wire = self._wire = world.group_for("wire", alone=not concurrent)
        if sums.allreduce is nccl:
            communicator(wire, arena.grad)  # now, before training, it can still be refused
        overlap.let_compute(wire, concurrent)
        cut = overlap.cut(arena, wire, options, concurrent)
        reduce = overlap.shared_form(self.update.reduce, wire, arena.grad, cut, options)
        self._reducer = Reducer(
            arena.grad, cut, wire, reduce, concurrent, trace, options.priority, self.check.bucket
        )
        if options.priority:
            parts = [slice(bucket.start, bucket.stop) for bucket in cut]
            update = InParts(optimizer, self.update.state, arena.param, arena.slots, parts)
            self._as_needed = AsNeeded(self._reducer, update, times, trace)
        elif self._compressor is None and not on_device(arena.grad):
            self._own_sum = self.update.own
        if self.update.reduce is auto:
            self.algorithm = f"auto ({', '.join(dict.fromkeys(self._reducer.algorithms))})"

    def train(self, work: Work, start: int, until: int) -> tuple[int, Flags]:
        """Train from step `start` to `until`."""
        return in_step(self, work, start, until)

    def step(self, task: Task, flags: Flags) -> tuple[Sums, Flags]:
        """Sum the gradients of all shares while backward runs, and update with the sum."""
        times, add = self.times, self._trace.add
        start, waited = perf_counter(), times.wait_s
        if self._compressor is not None:
            self._compressor.begin()
        need = self._as_needed.need if self._as_needed else None
        key = task.key._replace(sum_over_ranks=self._sum_and_wait, on_need=need)
        ready = self.check.begin(self._reducer.ready, own=self._own_sum is None)
        sums = self.replica.gradient(task.batch, task.scale, key, ready)
        if not self.check.passes(sums):
            flags = flags.failing(self.worker)
        waits = perf_counter()
        computed = add("forward, backward", "compute", start, waits)
        times.compute_s += computed - (times.wait_s - waited)  # a layer may have waited on its way
        if self._own_sum is None:
            flags = self._vote(flags)
        sums = self._sums.of_the_step(sums, self.sum)
        if self._as_needed is not None and not flags.failed:
            times.wait_s += add("wait for flags", "wait", waits, perf_counter())
            self._as_needed.begin()
        else:
            flags = self._finish(waits, flags)
        if flags.failed:
            self._undo()
            if self._own_sum is not None:
                flags = self._blame(task._replace(key=key), flags)
        times.wire_s = self._reducer.wire_s
        return sums, flags

    def _finish(self, since: float, flags: Flags) -> Flags:
        """Wait for all sums, and update with them unless the step has failed."""
        times, add = self.times, self._trace.add
        gradient = self._reducer.wait()
        if self._own_sum is not None:
            fine = self.check.sum_passes(gradient[self._own_sum])
            flags = self._vote(flags if fine else flags.failing(self.worker))
        arrived = perf_counter()
        times.wait_s += add("wait for gradients", "wait", since, arrived)
        waited = times.wait_s
        finite = self._compressor is None or self._compressor.finite()
        if not flags.failed and not finite:  # on all ranks: they hold the same sum
            self.check.fault = compression_state.fault_of_the_sum(self._compressor)
            flags = flags.failing(self.workers)
        if not flags.failed:
            self.update(gradient)
        self._reducer.release()
        updated = add("update", "compute", arrived, perf_counter())
        times.compute_s += updated - (times.wait_s - waited)  # ranks wait for each other on the way
        return flags

    def _blame(self, task: Task, flags: Flags) -> Flags:
        """Return `flags` with the rank whose own gradient makes the sum not finite; collective.

        The sum was written over the gradients: so all ranks compute theirs once more.
        """
        ready = self.check.begin(ignore_ready)
        key = task.key._replace(again=True)
        sums = self.replica.gradient(task.batch, task.scale, key, ready)
        own = flags._replace(failed=0)
        own = self._vote(own if self.check.passes(sums) else own.failing(self.worker))
        self.check.undo()
        if own.failed:
            return own
        self.check.fault = "the sum of gradients is not finite"  # of a replica that draws numbers
        return flags.failing(self.workers)

    def _undo(self) -> None:
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
        total = np.array(numbers, np.float64)
        recursive_doubling(self._group, total, np.add)
        return total

    def _sum_and_wait(self, numbers: np.ndarray) -> np.ndarray:
        """Return sums over ranks for a layer; the time counts as waiting."""
        # On the main link, while the wire thread has its own: each keeps its order on all ranks.
        start = perf_counter()
        total = self.sum(numbers)
        self.times.wait_s += self._trace.add("sum in a layer", "wait", start, perf_counter())
        return total

    def settle(self) -> None:
        """Apply the sums that are still under way; then all ranks hold the same parameters."""
        if self._as_needed is not None:
            self._as_needed.finish()

    def state(self) -> list[Piece]:
        """Return this rank's part of the state."""
        link = self._group.link
        return self.update.pieces() + compression_state.pieces(
            self._compressor, link.rank, link.size
        )

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take the whole state."""
        self.update.load(arrays)
        compression_state.load(
            self._compressor, arrays, self._group.link.rank, self._group.link.size
        )

    def close(self) -> None:
        """End the communication thread and free its link; collective."""
        self._reducer.close()
        if self._wire is not None:
            self._wire.free()

    def _vote(self, flags: Flags) -> Flags:
        return Flags(*largest(self._group, flags))


def _must_take_buckets(optimizer: Optimizer, options: AllReduce) -> None:
    if options.priority and optimizer.needs_norms:
        raise UsageError(
            "[wire] priority: parameters are updated bucket by bucket; expected an optimizer "
            "that needs no norm of whole tensors, seen lars, lamb or clip_norm"
        )


def _must_be_on_cores(replica: Replica, options: AllReduce) -> None:
    """Raise UsageError for an option that needs gradients in the memory of the host."""
    if options.share_parameters and on_device(replica.arena.grad):
        raise UsageError(
            "[engine] share_parameters: expected device = 'cpu'; on a GPU it is not there yet"
        )


def _same_start(world: World, replica: Replica, options: AllReduce) -> None:
    """Move gradients to memory shared with neighbours; broadcast the parameters of rank 0."""
    grad = replica.arena.grad
    replica.move(grad=world.memory.zeros_like(grad))
    arena = replica.arena
    settings = f"{options}, {arena.param.dtype}, {arena.slots}, {arena.buffer_slots}"
    world.must_agree(settings, "model and options")
    for plane in (arena.param, arena.buffer):
        broadcast(world.main, plane)  # a user's own model may start from random numbers
