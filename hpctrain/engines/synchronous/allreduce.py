"""Synchronous data parallelism: every rank holds all parameters, gradients are summed.

    g_i = dL/dw on rank i's share      g = g_1 + ... + g_P  (all-reduce)      w <- w - update(g)

Every rank makes the same update from the same bytes, so the replicas stay equal. Sent per rank
and step: 2n(P-1)/P bytes with a ring, n being the bytes of the parameters. With `shard_optimizer`
each rank makes 1/P of the update, for as many bytes; see `update.py`. How gradients are summed is
in `gradient_sums.py`, how ranks agree that a step can be applied in `finite_vote.py`.
Source: Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017.
"""

from __future__ import annotations

from functools import partial

from hpctrain.checkpoint import Piece
from hpctrain.collectives.nccl import communicator_for, nccl
from hpctrain.core import config
from hpctrain.core.errors import LostRankError, UsageError
from hpctrain.core.xp import on_device
from hpctrain.engines.base import EngineBase
from hpctrain.engines.engine import AgreedCommit, Flags, Task, sum_in_layer, train_in_lockstep
from hpctrain.engines.options import EngineOptions
from hpctrain.engines.saved_state import SavedState
from hpctrain.engines.synchronous import overlap
from hpctrain.engines.synchronous.contradictions import contradictions
from hpctrain.engines.synchronous.finite_vote import make_vote
from hpctrain.engines.synchronous.gradient_sums import make_gradient_sums
from hpctrain.engines.synchronous.node_shared_params import NodeSharedUpdate
from hpctrain.engines.synchronous.single import Single, SingleEngine
from hpctrain.engines.synchronous.update import ReplicatedUpdate, ShardedUpdate
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.reducer import Reducer, SumFunction, WireOptions, first_ready
from hpctrain.gradients.replica import Bytes, Memory, Replica
from hpctrain.nn import Sums
from hpctrain.optim import Optimizer
from hpctrain.optim.optimizer import planes
from hpctrain.transport.pace import Pace
from hpctrain.tuning.select import auto, find_all_gather
from hpctrain.world import World


@config.options
class AllReduce(WireOptions, EngineOptions):
    """How gradients are summed; in a recipe the keys of WireOptions stand in `[wire]`."""

    shard_optimizer: bool = False  #: each rank keeps 1/P of the optimizer's state
    share_parameters: bool = False  #: all ranks of a node have one array of parameters

    def __post_init__(self) -> None:
        """Refuse options that contradict each other or the method of compression."""
        super().__post_init__()
        if self.reduction == "ordered":
            find_all_gather(self.algorithm)  # raises an error if there is none
        for has_conflict, message in contradictions(
            self, self.shard_optimizer, self.share_parameters
        ):
            if has_conflict:
                raise UsageError(message)

    def build(
        self, world: World, replica: Replica, optimizer: Optimizer
    ) -> AllReduceEngine | SingleEngine:
        """Return this rank's engine, SingleEngine for one rank; collective."""
        if world.size == 1 and world.grid is None:
            single_options = Single(reduction=self.reduction, blocks=self.blocks)
            return single_options.build(world, replica, optimizer)
        return AllReduceEngine(world, replica, optimizer, self)


class AllReduceEngine(EngineBase):
    """See `hpctrain.engines.engine.Engine`.

    A step is made of four objects: the sums of gradients, the update, the ranks' vote on it, and
    its commit.
    """

    name = "allreduce"

    def __init__(self, world: World, replica: Replica, optimizer: Optimizer, options: AllReduce):
        _must_fit(options, replica, optimizer)
        replica.move(grad=world.memory.zeros_like(replica.arena.grad))  # for neighbours to read
        super().__init__(world, replica, str(options))
        self.algorithm = options.algorithm
        self._sums = make_gradient_sums(world, replica, options, optimizer.skips_absent)
        self.replica = self._sums.replica
        self.check = GradientCheck(self.replica, world.size, self._sums.parts)
        self._sum_in_layer = partial(sum_in_layer, self._group, self.times, self._trace)
        self.update, self._reducer = self._make_update(replica, optimizer, options)
        self._on_need = self.update.on_need
        self._vote = make_vote(self._sums, self.check, world.voters, self.update.own)
        is_whole = self.update.is_replicated and self._sums.is_exact and world.grid is None
        if world.job is not None and is_whole:
            self.commit = AgreedCommit(world.link, self.replica.arena, self.update.state)

    def _make_update(
        self, replica: Replica, optimizer: Optimizer, options: AllReduce
    ) -> tuple[
        ReplicatedUpdate | ShardedUpdate | NodeSharedUpdate,
        Reducer | NodeSharedUpdate | overlap.UpdateOnNeed,
    ]:
        """Return the update, and the object that brings it the gradients; collective."""
        world, sums, arena = self._world, self._sums, replica.arena
        if options.share_parameters:
            shared = NodeSharedUpdate(world, replica, optimizer, sums.allreduce, self.times)
            return shared, shared
        if options.shard_optimizer:
            wait = partial(self.times.wait, self._trace)
            sharded = ShardedUpdate(self._group, arena, optimizer, sums, wait)
            return sharded, self._make_reducer(sharded.reduce, options)
        make_reducer = partial(self._make_reducer, sums.allreduce, options)
        if options.priority:
            on_need = overlap.UpdateOnNeed(world, arena, optimizer, make_reducer, self.times)
            return on_need, on_need
        # The optimizer may lack memory: it is asked before a thread begins.
        return ReplicatedUpdate(world.link, arena, optimizer), make_reducer()

    def _make_reducer(self, reduce: SumFunction, options: AllReduce) -> Reducer:
        """Return the reducer of gradients in buckets; collective."""
        world, arena = self._world, self.replica.arena
        concurrent = overlap.uses_thread(world, options)
        wire_group = world.threads.group_for("wire", alone=not concurrent)
        self._links += wire_group.links
        if self._sums.allreduce is nccl:
            communicator_for(wire_group, arena.grad)  # now, while a failure can still be reported
        if concurrent and len(wire_group.nodes) > 1:
            for link in wire_group.links:
                link.endpoint.waits.pace = Pace()  # it polls for other nodes, beside compute
        buckets = overlap.choose_buckets(arena, wire_group, options, concurrent)
        reducer = Reducer(
            arena.grad,
            buckets,
            wire_group,
            overlap.prefer_shared_sum(reduce, wire_group, arena.grad, buckets, options),
            concurrent,
            trace=self._trace,
            send_order=overlap.first_needed if options.priority else first_ready,
            check=self.check.on_bucket,
        )
        if reduce is auto:
            algorithm_names = dict.fromkeys(bucket.algorithm for bucket in reducer.sums)
            self.algorithm = f"auto ({', '.join(algorithm_names)})"
        return reducer

    train = train_in_lockstep

    def step(self, task: Task, flags: Flags) -> tuple[Sums, Flags]:
        """Sum the gradients over the ranks while backward runs, and update with the sum.

        After a LostRankError the state is whole again, as before or after the step.
        """
        self.commit.begin()
        try:
            return self._step(task, flags)
        except LostRankError:
            if self.commit.step == task.key.step:
                self._undo()
            raise

    def _step(self, task: Task, flags: Flags) -> tuple[Sums, Flags]:
        key = task.key._replace(sum_over_ranks=self._sum_in_layer, on_need=self._on_need)
        task = task._replace(key=key)
        with self.times.compute(self._trace, "forward, backward"):
            self._sums.begin()
            on_ready = self._vote.begin(self._reducer.mark_ready)
            sums, flags = self._vote.compute_gradient(task, on_ready, flags)
        with self.times.wait(self._trace, "wait for flags"):
            flags = self._vote.before_sums(flags)
            sums = self._sums.step_sums(sums, self.sum, self.commit.shares_sums)
        flags = self._apply_sums(flags, key.step)
        if flags.failed:
            self._undo()
            flags = self._vote.name_failing_rank(task, flags)
        self.times.wire_s = self._reducer.wire_s
        return sums, flags

    def _apply_sums(self, flags: Flags, step: int) -> Flags:
        """Wait for all sums, and update with them unless the step has failed; return the flags."""
        with self.times.wait(self._trace, "wait for gradients"):
            gradient = self._reducer.wait()
            flags = self._vote.after_sums(gradient, flags)
            self.commit.agree(step, bool(flags.failed))
        with self.times.compute(self._trace, "update"):
            if not flags.failed:
                self.update(gradient)
            self.commit.release(self._reducer.release)
        return flags

    def _undo(self) -> None:
        """Restore what the gradient of a step has changed before its update."""
        self.check.undo()
        self._sums.undo()

    def settle(self) -> None:
        """Complete the last update, and share buffers; then all ranks hold the same planes."""
        self.update.settle()
        super().settle()

    def memory(self, plane_bytes: int) -> Memory:
        """Return the bytes of this rank's optimizer state; see `Engine.memory`."""
        moments, itemsize = planes(self.update.state).values(), self.replica.arena.param.itemsize
        length = self.update.own_length(plane_bytes // itemsize)
        measured_bytes = sum(x.nbytes for x in moments)
        return {"optimizer": Bytes(measured_bytes, itemsize * length * len(moments))}

    def state(self) -> list[Piece]:
        """Return this rank's part of the state."""
        return self.update.pieces() + self._sums.pieces()

    def load(self, saved: SavedState) -> None:
        """Request this rank's part of the state."""
        self.update.load(saved)
        self._sums.load(saved)

    def close(self) -> None:
        """End the communication thread and free its link; collective."""
        self._reducer.close()
        super().close()


def _must_fit(options: AllReduce, replica: Replica, optimizer: Optimizer) -> None:
    """Raise UsageError for options that do not fit the device or the optimizer."""
    if options.priority and optimizer.needs_norms:
        raise UsageError(
            "[wire] priority: parameters are updated bucket by bucket; expected an optimizer "
            "that needs no norm of whole tensors, seen lars, lamb or clip_norm"
        )
    if options.share_parameters and on_device(replica.arena.grad):
        raise UsageError(
            "[engine] share_parameters: expected device = 'cpu'; not yet available on a GPU"
        )
