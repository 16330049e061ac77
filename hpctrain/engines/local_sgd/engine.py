"""Local SGD: workers train apart for `period` steps, then their parameters are averaged.

    x_i <- x_i - update(P g_i)     H times, each worker i on its share of each batch
    x_i <- (x_1 + ... + x_P) / P   also running statistics, and the optimizer's state if requested

g_i is scaled as in every engine, so that the shares of a batch add up to its gradient: with even
shares P g_i is the mean gradient of the worker's samples. With H = 1 plain SGD makes the step of
`allreduce`, also with uneven shares. Sent per rank and averaging: 2n(P-1)/P bytes with a ring,
every H steps. Ranks exchange flags when they average, and at the steps of evaluations and
checkpoints: there all ranks receive requests to stop and failures of workers. A worker does not
apply a gradient that is not finite: it drops the gradient and continues, or ends the run, see
`[run] not_finite`.

start_after  before that step gradients are averaged, in each step (post-local SGD)
momentum     "kept": each worker keeps its own optimizer state; "averaged": the state is averaged
outer        "nesterov": the change of a round is the gradient of an outer optimizer (DiLoCo)
                 d = x - mean x_i,   v <- mu v + d,   x <- x - rate (d + mu v),   x_i <- x
delay        S: the sum is exchanged during S more steps (DASO)
                 x_i <- (2S x_i + sum of the x of S steps ago) / (2S + P)
apart        "nodes": the ranks of a node sum their gradients in each step; nodes train apart

Sources: Stich, "Local SGD converges fast and communicates little", 2019; Lin, Stich, Patel and
Jaggi, "Don't use large mini-batches, use local SGD", 2018; Douillard et al., "DiLoCo: distributed
low-communication training of language models", 2023; Coquelin et al., "Accelerating neural network
training with distributed asynchronous and selective optimization (DASO)", 2021.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from hpctrain.checkpoint import Piece
from hpctrain.collectives import AllReduceFunction, Group
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.engines.engine import (
    Commit,
    Flags,
    Task,
    Times,
    Work,
    average_over,
    join_flags,
    sum_in_layer,
    train_in_lockstep,
)
from hpctrain.engines.local_sgd.outer_step import Averaging, DelayedAverage, OuterOptimizer
from hpctrain.engines.options import EngineOptions
from hpctrain.engines.saved_state import SavedState, pieces_of
from hpctrain.engines.synchronous.allreduce import AllReduce, AllReduceEngine
from hpctrain.engines.worker_state import WorkerState
from hpctrain.gradients.reducer import WireOptions
from hpctrain.gradients.replica import Replica
from hpctrain.nn import Key, Sums
from hpctrain.optim import Optimizer
from hpctrain.world import World

#: An outer momentum of 0.9 adds up the changes of 10 rounds: after 8 steps each, they point beyond
#: the minimum and the loss rises (see docs/engines.md); after 64 a change is near its end.
DEFAULT_PERIODS = {"none": 8, "nesterov": 64}


@config.options
class LocalSgd(WireOptions, EngineOptions):
    """When parameters are averaged, and how the average is applied."""

    #: Steps between two averagings; None: DEFAULT_PERIODS, by `outer`.
    period: Annotated[int, Field(ge=1)] | None = None
    start_after: Annotated[int, Field(ge=0)] = 0  #: first steps, which average gradients
    momentum: Literal["averaged", "kept"] = "kept"
    outer: Literal["none", "nesterov"] = "none"
    outer_rate: Annotated[float, Field(gt=0)] | None = None  #: None: 0.7
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] | None = None  #: None: 0.9
    delay: Annotated[int, Field(ge=0)] = 0  #: steps during which an average is exchanged
    apart: Literal["ranks", "nodes"] = "ranks"  #: the units that train apart

    def __post_init__(self) -> None:
        """Set the default period; refuse options that contradict each other."""
        super().__post_init__()
        period = self.period or DEFAULT_PERIODS[self.outer]
        object.__setattr__(self, "period", period)
        self.must_have_defaults("local-sgd")
        keys = [key for key in ("outer_rate", "outer_momentum") if getattr(self, key) is not None]
        if keys and self.outer == "none":
            raise UsageError(
                f"[engine] {', '.join(keys)}: expected outer = 'nesterov' beside it, seen 'none'"
            )
        if self.delay >= period:
            raise UsageError(
                f"[engine] delay: expected less than the period of {period} steps, so that "
                f"one average arrives before the next one starts; seen {self.delay}"
            )
        if self.delay and (self.outer != "none" or self.momentum != "kept"):
            raise UsageError(
                "[engine] delay: expected outer = 'none' and momentum = 'kept', since a delayed "
                f"average is only mixed in; seen '{self.outer}' and '{self.momentum}'"
            )

    def build(self, world: World, replica: Replica, optimizer: Optimizer) -> LocalSgdEngine:
        """Return this rank's engine; collective."""
        return LocalSgdEngine(world, replica, optimizer, self)


class LocalSgdEngine(AllReduceEngine):
    """See `hpctrain.engines.engine.Engine`; the first steps are steps by all-reduce."""

    name, keeps_step = "local-sgd", False

    def __init__(self, world: World, replica: Replica, optimizer: Optimizer, options: LocalSgd):
        world.must_agree(str(options), "the options of local SGD")
        allreduce_options = AllReduce(
            algorithm=options.algorithm, bucket_bytes=options.bucket_bytes, overlap=options.overlap
        )
        super().__init__(world, replica, optimizer, allreduce_options)
        self.algorithm, self._options = options.algorithm, options
        assert options.period is not None  # set by LocalSgd
        self._period: int = options.period
        self.commit = Commit()  # workers that train apart hold states of their own
        self._node_group = NodeGroup(
            world, self.times, self._sums.allreduce, options.apart == "nodes"
        )
        self._links.append(self._node_group.link)
        self._worker_state = WorkerState(
            replica.arena, optimizer, self.update.state, world.rank, world.size
        )
        self._worker_state.set_averaged(with_states=True)
        self._averaging = self._make_averaging()

    def _make_averaging(self) -> Averaging:
        """Return the use of averages; collective."""
        options, arena = self._options, self.replica.arena
        if options.delay:
            averaging = DelayedAverage(
                self._world,
                arena,
                list(self._worker_state.planes.values()),
                allreduce=self._sums.allreduce,
                delay=options.delay,
                times=self.times,
            )
            self._links.append(averaging.link)
            return averaging
        if options.outer == "nesterov":
            return OuterOptimizer(arena, options.outer_rate, options.outer_momentum)
        return Averaging()

    def train(self, work: Work, start: int, until: int) -> tuple[int, Flags]:
        """Train from step `start` to `until`."""
        step, flags = start, Flags()
        self._worker_state.restore_planes()
        if step < self._options.start_after:
            if self._worker_state.states_differ:
                self._average_workers(with_states=True)
            lockstep_end = min(until, self._options.start_after)
            step, flags = train_in_lockstep(self, work, step, lockstep_end)
            self._averaging.begin()
        while step < until and not any(flags):
            step, flags = self._train_round(work, step, min(until, self._round_end(step)))
        return step, flags

    def _train_round(self, work: Work, start: int, stop: int) -> tuple[int, Flags]:
        """Train apart from step `start` to `stop`; there all ranks exchange flags."""
        self._worker_state.train_apart()
        step, may_continue = start, True
        while step < stop and may_continue:
            sums, is_applied = self._train_step(work.task(step))
            may_continue = self.check.may_continue(is_applied, work.max_drops)
            if may_continue:
                step += 1
                self._averaging.end_step((step - self._options.start_after) % self._period)
            if is_applied:
                work.record(step, sums)
        # If a node has failed, only the rank with the non-finite gradient reports it.
        failed = not may_continue and bool(self.check.fault)
        own_flags = work.flags()
        with self.times.wait(self._trace, "wait for flags"):
            step, flags = join_flags(self._world.voters, step, own_flags, failed)
        if flags.failed:
            self.settle()
        elif self._round_end(stop - 1) == stop:
            averages_states = self._options.momentum == "averaged"
            self._averaging.end_round(partial(self._average_workers, averages_states))
        return step, flags

    def _train_step(self, task: Task) -> tuple[Sums, bool]:
        """Update with the gradient of this node, if finite; return (sums, whether it was)."""
        # The mean over workers must equal the gradient of the batch: scale each share by P.
        scale = task.scale * self.workers / self._node_group.size
        key = self._node_group.key_with_sums(task.key)
        sums, is_finite = self._compute_gradient(task._replace(scale=scale, key=key))
        grad = self.replica.arena.grad
        is_applied = self._node_group.sum_gradients(grad, is_finite)
        with self.times.compute(self._trace, "update"):
            if is_applied:
                self.update(grad)
            else:
                self.check.undo()
        return sums, is_applied

    def _average_workers(self, with_states: bool) -> None:
        """Average the planes of the workers; `with_states` also the states of the optimizers."""
        state = self.update.state if with_states else {}
        moments = [x for name, x in state.items() if name != "step"]
        self._average([*self._worker_state.planes.values(), *moments])
        self._worker_state.set_averaged(with_states)

    def _average(self, arrays: Iterable[np.ndarray]) -> None:
        """Replace each of `arrays` by its mean over the workers."""
        with self.times.wait(self._trace, "average", on_wire=True):
            average_over(self._group, self._sums.allreduce, arrays)

    def _round_end(self, step: int) -> int:
        """Return the step at which the round of `step` ends."""
        local_steps = step - self._options.start_after
        return step - local_steps % self._period + self._period

    def settle(self) -> None:
        """Average into the arena; the next `train` continues from each worker's own planes."""
        self._worker_state.settle(self._average)
        super().settle()  # of steps in which gradients were averaged

    def state(self) -> list[Piece]:
        """Return this rank's 1/P of the common state, and this worker's own arrays."""
        common_state = {} if self._worker_state.states_differ else self.update.state
        rank, size = self._group.link.rank, self._group.link.size
        return [
            *self._worker_state.pieces(),
            *pieces_of(self.replica.arena, common_state, rank, size),
            *self._averaging.pieces(rank, size),
        ]

    def load(self, saved: SavedState) -> None:
        """Request the whole state; the same number of workers request each its own arrays.

        Another number of workers starts from the means of parameters and of optimizer states.
        """
        self._worker_state.load(saved)
        self._worker_state.states_differ = saved.workers == self.workers
        self._averaging.load(saved)

    def close(self) -> None:
        """End the communication threads and free their links; collective."""
        self._averaging.close()
        super().close()


class NodeGroup:
    """The ranks on this rank's host; without `group_by_host` only this rank.

    In every step gradients are summed within the node, over fast links; the engine exchanges
    parameters between nodes. A node with a single rank sums nothing.
    """

    def __init__(
        self, world: World, times: Times, allreduce: AllReduceFunction, group_by_host: bool
    ):
        """Create the link of the node; collective."""
        color = world.hosts.index(world.host) if group_by_host else world.rank
        self.link = world.threads.link_for("node", color)
        self._group, self._allreduce = Group(self.link), allreduce
        self._times, self._trace = times, world.trace

    @property
    def size(self) -> int:
        return self.link.size

    def key_with_sums(self, key: Key) -> Key:
        """Return `key` with a function by which layers sum over the node."""
        if self.size == 1:
            return key
        sum_over_node = partial(sum_in_layer, self._group, self._times, self._trace, on_wire=True)
        return key._replace(sum_over_ranks=sum_over_node)

    def sum_gradients(self, grad: np.ndarray, is_finite: bool) -> bool:
        """Sum the gradients of the node in place, if all are finite; return whether they are."""
        if self.size == 1:
            return is_finite
        with self._times.wait(self._trace, "sum in the node", on_wire=True):
            failure = np.array([not is_finite], np.int32)
            recursive_doubling(self._group, failure, np.maximum)
            if not failure[0]:
                self._allreduce(self._group, grad, np.add)
        return not failure[0]
