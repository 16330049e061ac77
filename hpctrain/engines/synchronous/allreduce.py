"""Synchronous data parallelism: every rank holds all parameters, gradients are summed.

    g_i = dL/dw on rank i's share      g = g_1 + ... + g_P  (all-reduce)      w <- w - update(g)

Every rank makes the same update from the same bytes, so the replicas stay equal. Sent per rank
and step: 2n(P-1)/P bytes with a ring, n being the bytes of the parameters. With `shard_optimizer`
each rank makes 1/P of the update, for as many bytes; see `update.py`. How gradients are summed is
in `gradient_sums.py`, how ranks agree that a step can be applied in `finite_vote.py`.
Source: Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hpctrain.checkpoint import Piece
from hpctrain.collectives.nccl import communicator_for, nccl
from hpctrain.core import config
from hpctrain.core.errors import LostRankError, ModelError, UsageError
from hpctrain.core.xp import on_device
from hpctrain.engines.base import EngineBase
from hpctrain.engines.engine import Flags, Task, sum_in_layer, train_in_lockstep
from hpctrain.engines.saved_state import SavedState, pieces_of
from hpctrain.engines.synchronous import overlap
from hpctrain.engines.synchronous.contradictions import contradictions
from hpctrain.engines.synchronous.finite_vote import CompressedVote, GradientVote, SumVote
from hpctrain.engines.synchronous.gradient_sums import CompressedSums, make_gradient_sums
from hpctrain.engines.synchronous.node_shared_params import NodeSharedUpdate
from hpctrain.engines.synchronous.single import Single, SingleEngine
from hpctrain.engines.synchronous.update import PartwiseUpdate, ReplicatedUpdate, ShardedUpdate
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.reducer import Reducer, SumFunction, WireOptions
from hpctrain.gradients.replica import Replica
from hpctrain.nn import Sums
from hpctrain.optim import Optimizer
from hpctrain.transport.pace import Pace
from hpctrain.tuning.select import auto, find_all_gather
from hpctrain.world import World


@config.options
class AllReduce(WireOptions):
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
        engine_class = PriorityEngine if self.priority else AllReduceEngine
        return engine_class(world, replica, optimizer, self)


class AllReduceEngine(EngineBase):
    """See `hpctrain.engines.engine.Engine`."""

    name = "allreduce"
    _on_need: Callable[[str], None] | None = None  # the forward pass waits for no update
    _lost_rank: LostRankError | None = None  # after a committed step: the next one raises it

    def __init__(self, world: World, replica: Replica, optimizer: Optimizer, options: AllReduce):
        if options.share_parameters and on_device(replica.arena.grad):
            raise UsageError(
                "[engine] share_parameters: expected device = 'cpu'; not yet available on a GPU"
            )
        replica.move(grad=world.memory.zeros_like(replica.arena.grad))  # for neighbours to read
        super().__init__(world, replica, str(options))
        self.algorithm = options.algorithm
        self._sums = make_gradient_sums(world, replica, options, optimizer.skips_absent)
        self.replica = self._sums.replica
        self.check = GradientCheck(self.replica, world.size, self._sums.parts)
        self._sum_in_layer = partial(sum_in_layer, self._group, self.times, self._trace)
        self.update: ReplicatedUpdate | ShardedUpdate | NodeSharedUpdate
        self._reducer: Reducer | NodeSharedUpdate
        if options.share_parameters:
            self.update = self._reducer = NodeSharedUpdate(
                world, replica, optimizer, self._sums.allreduce, self.times
            )
        else:
            arena = self.replica.arena
            self.update = (
                ShardedUpdate(self._group, arena, optimizer, self._sums, self.times, self._trace)
                if options.shard_optimizer
                else ReplicatedUpdate(world.link, arena, optimizer, self._sums)
            )
            self._reducer = self._make_reducer(self.update.reduce, options)
        self.optimizer_state = self.update.state
        self._vote = self._make_vote(options)
        is_split = isinstance(self._sums, CompressedSums) or world.grid is not None
        # Each rank holds the whole state, and changes it once per step.
        is_replicated = isinstance(self.update, ReplicatedUpdate) and not is_split
        self.shares_sums = world.survives and is_replicated and not options.priority

    def _make_reducer(self, reduce: SumFunction, options: AllReduce) -> Reducer:
        """Return the reducer of gradients in buckets; collective."""
        world, arena = self._world, self.replica.arena
        concurrent = overlap.uses_thread(world, options)
        wire_group = world.group_for("wire", alone=not concurrent)
        self._links += wire_group.links
        if self._sums.allreduce is nccl:
            communicator_for(wire_group, arena.grad)  # now, while a failure can still be reported
        if concurrent and len(wire_group.nodes) > 1:
            for link in wire_group.links:
                link.pace = Pace()  # it polls for other nodes, beside compute
        buckets = overlap.choose_buckets(arena, wire_group, options, concurrent)
        reducer = Reducer(
            arena.grad,
            buckets,
            wire_group,
            overlap.prefer_shared_sum(reduce, wire_group, arena.grad, buckets, options),
            concurrent,
            trace=self._trace,
            send_order=options.send_order,
            check=self.check.on_bucket,
        )
        if reduce is auto:
            algorithm_names = dict.fromkeys(bucket.algorithm for bucket in reducer.sums)
            self.algorithm = f"auto ({', '.join(algorithm_names)})"
        return reducer

    def _make_vote(self, options: AllReduce) -> GradientVote:
        """Return the vote on each step: on sums where all ranks wait for them after backward."""
        replica, check, group = self.replica, self.check, self._world.voters
        if isinstance(self._sums, CompressedSums):
            return CompressedVote(replica, check, group, self._sums.compressor)
        sums_early = options.priority or on_device(replica.arena.grad)
        if sums_early or isinstance(self.update, NodeSharedUpdate):
            return GradientVote(replica, check, group)
        return SumVote(replica, check, group, self.update.own)

    train = train_in_lockstep

    def step(self, task: Task, flags: Flags) -> tuple[Sums, Flags]:
        """Sum the gradients over the ranks while backward runs, and update with the sum.

        After a LostRankError the state is whole again, as before or after the step.
        """
        if self._lost_rank is not None:
            raise self._lost_rank
        try:
            return self._step(task, flags)
        except LostRankError:
            if self.committed_step == task.key.step:
                self.check.undo()
                self._sums.undo()
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
            sums = self._sums.step_sums(sums, self.sum, self.shares_sums)
        flags = self._apply_sums(flags, key.step)
        if flags.failed:
            self.check.undo()
            self._sums.undo()
            flags = self._vote.name_failing_rank(task, flags)
        self.times.wire_s = self._reducer.wire_s
        return sums, flags

    def _apply_sums(self, flags: Flags, step: int) -> Flags:
        """Wait for all sums, and update with them unless the step has failed; return the flags."""
        with self.times.wait(self._trace, "wait for gradients"):
            gradient = self._reducer.wait()
            flags = self._vote.after_sums(gradient, flags)
            if self.shares_sums:
                self._world.link.agree()  # all ranks that are left have the sums, or none updates
                if not flags.failed:
                    self.committed_step = step + 1
        with self.times.compute(self._trace, "update"):
            if not flags.failed:
                self.update(gradient)
            try:
                self._reducer.release()
            except LostRankError as error:
                if not self.shares_sums:
                    raise
                self._lost_rank = error  # the step is committed; others may still read the sums
        return flags

    def state(self) -> list[Piece]:
        """Return this rank's part of the state."""
        return self.update.pieces() + self._sums.pieces()

    def whole_state(self) -> list[Piece]:
        """Return all pieces of the state of `committed_step`."""
        return pieces_of(self.replica.arena, self.update.state, 0, 1)

    def load(self, saved: SavedState) -> None:
        """Request this rank's part of the state."""
        self.update.load(saved)
        self._sums.load(saved)

    def close(self) -> None:
        """End the communication thread and free its link; collective."""
        self._reducer.close()
        super().close()


class PriorityEngine(AllReduceEngine):
    """Updates each bucket when the next forward pass needs it, or while that pass waits.

    See overlap.py.
    """

    _reducer: Reducer

    def __init__(self, world: World, replica: Replica, optimizer: Optimizer, options: AllReduce):
        if optimizer.needs_norms:
            raise UsageError(
                "[wire] priority: parameters are updated bucket by bucket; expected an optimizer "
                "that needs no norm of whole tensors, seen lars, lamb or clip_norm"
            )
        super().__init__(world, replica, optimizer, options)
        arena = self.replica.arena
        buckets = [bucket_sum.bucket for bucket_sum in self._reducer.sums]
        parts = [slice(bucket.start, bucket.stop) for bucket in buckets]
        self._bucket_update = PartwiseUpdate(
            optimizer, self.update.state, arena.param, arena.layout, parts
        )
        self._is_checked = False
        # slots for which no gradient has called on_need yet
        self._unrequested_names = {slot.name for slot in arena.slots}
        self._unapplied_buckets: set[int] = set()  # buckets whose sums are not applied yet

    def settle(self) -> None:
        """Apply all remaining sums and share buffers; then all ranks hold the same planes."""
        with self.times.compute(self._trace, "apply remaining sums"):
            while self._unapplied_buckets:
                self._apply_next(max(self._unapplied_buckets))
        self.times.wire_s = self._reducer.wire_s
        super().settle()

    def _apply_sums(self, flags: Flags, step: int) -> Flags:
        """Begin to wait for the sums of a step, unless it has failed; return `flags`.

        Raises ModelError if the first gradient has not called `on_need` for each parameter.
        """
        if flags.failed:
            return super()._apply_sums(flags, step)
        if not self._is_checked:
            self._world.on_all_ranks(self._check_calls)
            self._is_checked = True
        self._reducer.finish_backward()
        self._unapplied_buckets = set(range(len(self._reducer.sums)))
        return flags

    def _on_need(self, name: str) -> None:
        """Apply the sum of the bucket of slot `name`, unless it was applied already."""
        self._unrequested_names.discard(name)
        number = self._reducer.bucket_number(name)
        while number in self._unapplied_buckets:
            self._apply_next(number)

    def _apply_next(self, first: int) -> None:
        """Apply the sum of bucket `first`, or of another bucket that arrives before it."""
        with self.times.wait(self._trace, "wait for gradients", bucket=first):
            number = self._reducer.wait_for_any(self._unapplied_buckets, first)
        with self._trace.span("update", "compute", bucket=number):
            self._bucket_update(number, self._reducer.wait_for(number))
        self._unapplied_buckets.discard(number)
        if not self._unapplied_buckets:
            self._bucket_update.count()

    def _check_calls(self) -> None:
        if slot_names := self._unrequested_names:
            self._reducer.wait()  # no transfer may be under way when training ends
            more_text = f" and {len(slot_names) - 1} more" * (len(slot_names) > 1)
            raise ModelError(
                "[wire] priority: expected a model that calls key.on_need(name) before it first "
                f"reads a parameter, seen no call for '{min(slot_names)}'{more_text} in the first "
                "gradient; add the calls, or set priority = false"
            )
