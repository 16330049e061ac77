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

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from hpctrain import config
from hpctrain.checkpoint import Piece
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import namespace
from hpctrain.engines.engine import (
    Flags,
    Task,
    Work,
    join_flags,
    pieces_of,
    request_state,
    train_in_lockstep,
)
from hpctrain.engines.local_sgd.node_group import NodeGroup
from hpctrain.engines.local_sgd.outer_step import DelayedAverage, OuterOptimizer
from hpctrain.engines.saved_state import SavedState
from hpctrain.engines.synchronous.allreduce import AllReduce, AllReduceEngine
from hpctrain.gradients.reducer import WireOptions
from hpctrain.gradients.replica import Replica, ignore_ready
from hpctrain.nn import Sums
from hpctrain.optim import Optimizer
from hpctrain.tuning.select import find_allreduce
from hpctrain.world import World


@config.options
class LocalSgd(WireOptions):
    """When parameters are averaged, and how the average is applied."""

    period: Annotated[int, Field(ge=1)] = 8  #: steps between two averagings
    start_after: Annotated[int, Field(ge=0)] = 0  #: first steps, which average gradients
    momentum: Literal["averaged", "kept"] = "kept"
    outer: Literal["none", "nesterov"] = "none"
    outer_rate: Annotated[float, Field(gt=0)] | None = None  #: None: 0.7
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] | None = None  #: None: 0.9
    delay: Annotated[int, Field(ge=0)] = 0  #: steps during which an average is exchanged
    apart: Literal["ranks", "nodes"] = "ranks"  #: the units that train apart

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        super().__post_init__()
        self.must_have_defaults("local-sgd")
        keys = [key for key in ("outer_rate", "outer_momentum") if getattr(self, key) is not None]
        if keys and self.outer == "none":
            raise UsageError(
                f"[engine] {', '.join(keys)}: expected outer = 'nesterov' beside it, seen 'none'"
            )
        if self.delay >= self.period:
            raise UsageError(
                f"[engine] delay: expected less than the period of {self.period} steps, so that "
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


class LocalSgdEngine:
    """See `hpctrain.engines.engine.Engine`."""

    name = "local-sgd"
    servers = 0
    asynchronous = False
    staleness = recorder = None
    updates_per_step = 1.0

    def __init__(self, world: World, replica: Replica, optimizer: Optimizer, options: LocalSgd):
        world.must_agree(str(options), "the options of local SGD")
        allreduce_options = AllReduce(
            algorithm=options.algorithm, bucket_bytes=options.bucket_bytes, overlap=options.overlap
        )
        self._allreduce_engine = AllReduceEngine(world, replica, optimizer, allreduce_options)
        self.replica, self.algorithm = replica, options.algorithm
        self.times, self.check = self._allreduce_engine.times, self._allreduce_engine.check
        self.workers, self.worker = world.size, world.rank
        self._options, self._trace, self._group = options, world.trace, world.main
        self._update = self._allreduce_engine.update
        self._allreduce = find_allreduce(options.algorithm)
        self._node_group = NodeGroup(world, self.times, self._allreduce, options.apart == "nodes")
        arena = replica.arena
        self._planes = [x for x in (arena.param, arena.buffer) if x.size]
        self._moments = [x for name, x in self._update.state.items() if name != "step"]
        self._own_planes: list[np.ndarray] = []  # this worker's, while the arena holds the mean
        self._params_differ = False  # whether the parameters of workers may differ
        self._states_differ = False  # whether the optimizer states of workers may differ
        self._outer = self._delayed = None
        if options.outer != "none":
            self._outer = OuterOptimizer(arena, options.outer_rate, options.outer_momentum)
        if options.delay:
            self._delayed = DelayedAverage(world, self._planes, self._allreduce, options.delay)

    def train(self, work: Work, start: int, until: int) -> tuple[int, Flags]:
        """Train from step `start` to `until`."""
        step, flags = start, Flags()
        self._restore_planes()
        if step < self._options.start_after:
            self._average_states()
            lockstep_end = min(until, self._options.start_after)
            step, flags = train_in_lockstep(self._allreduce_engine, work, step, lockstep_end)
            if self._outer is not None:
                self._outer.begin()
        while step < until and not any(flags):
            step, flags = self._train_round(work, step, min(until, self._round_end(step)))
        return step, flags

    def _train_round(self, work: Work, start: int, stop: int) -> tuple[int, Flags]:
        """Train apart from step `start` to `stop`; there all ranks exchange flags."""
        self._params_differ = self._states_differ = True
        step, may_continue = start, True
        while step < stop and may_continue:
            sums, is_applied = self._train_step(work.task(step))
            may_continue = self.check.may_continue(is_applied, work.max_drops)
            if may_continue:
                step += 1
                self._mix_delayed_average(step)
            if is_applied:
                work.record(step, sums)
        # If a node has failed, only the rank with the non-finite gradient reports it.
        failed = not may_continue and bool(self.check.fault)
        step, flags = self._join_flags(step, failed, work.flags())
        if flags.failed:
            self.settle()
        elif self._round_end(stop - 1) == stop:
            self._finish_round()
        return step, flags

    def _average_states(self) -> None:
        """Average the states of the workers: synchronous steps need equal states."""
        if self._states_differ:
            self._average_arrays([*self._planes, *self._moments])
            self._params_differ = self._states_differ = False
        if self._delayed is not None:
            self._delayed.discard()

    def _train_step(self, task: Task) -> tuple[Sums, bool]:
        """Update with the gradient of this node, if finite; return (sums, whether it was)."""
        grad, times = self.replica.arena.grad, self.times
        # The mean over workers must equal the gradient of the batch: scale each share by P.
        scale = task.scale * self.workers / self._node_group.size
        key = self._node_group.key_with_sums(task.key)
        with times.compute(self._trace, "forward, backward"):
            sums = self.replica.gradient(task.batch, scale, key, self.check.begin(ignore_ready))
            is_finite = self.check.passes(sums)
        is_applied = self._node_group.sum_gradients(grad, is_finite)
        with times.compute(self._trace, "update"):
            if is_applied:
                self._update(grad)
            else:
                self.check.undo()
        return sums, is_applied

    def _finish_round(self) -> None:
        """Average the workers, or start a delayed average."""
        if self._delayed is not None:
            self._delayed.start()
            return
        averages_moments = self._options.momentum == "averaged"
        self._average_arrays([*self._planes, *(self._moments if averages_moments else [])])
        self._params_differ, self._states_differ = False, not averages_moments
        if self._outer is not None:
            self._outer.step()

    def _mix_delayed_average(self, step: int) -> None:
        """Mix in the delayed average, if it is due at `step`."""
        steps_since_start = (step - self._options.start_after) % self._options.period
        if self._delayed is not None and steps_since_start == self._options.delay:
            with self._trace.span("wait for an average", "wait") as wait_span:
                self.times.wire_s += self._delayed.mix()
            self.times.wait_s += wait_span.seconds

    def _average_arrays(self, arrays: Sequence[np.ndarray]) -> None:
        """Replace each of `arrays` by its mean over the workers."""
        with self._trace.span("average", "wait") as wait_span:
            for x in arrays:
                self._allreduce(self._group, x, np.add)
                x /= self.workers
        self.times.wait_s += wait_span.seconds
        self.times.wire_s += wait_span.seconds

    def _round_end(self, step: int) -> int:
        """Return the step at which the round of `step` ends."""
        period, local_steps = self._options.period, step - self._options.start_after
        return step - local_steps % period + period

    def _join_flags(self, step: int, failed: bool, flags: Flags) -> tuple[int, Flags]:
        """Return (step, flags) of all ranks: `step`, or the one at which a rank failed."""
        with self._trace.span("wait for flags", "wait") as wait_span:
            step, flags = join_flags(self._group, step, flags, failed)
        self.times.wait_s += wait_span.seconds
        return step, flags

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent since the start."""
        delayed_bytes = self._delayed.bytes_sent if self._delayed else 0
        return self._allreduce_engine.bytes_sent + self._node_group.bytes_sent + delayed_bytes

    def sum(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sums of a few float64 over all ranks, the same on each."""
        return self._allreduce_engine.sum(numbers)

    def settle(self) -> None:
        """Average into the arena; the next `train` continues from each worker's own planes."""
        if self._params_differ and not self._own_planes:
            self._own_planes = [x.copy() for x in self._planes]
            self._average_arrays(self._planes)

    def _restore_planes(self) -> None:
        for x, worker_plane in zip(self._planes, self._own_planes):  # noqa: B905  (may be empty)
            x[...] = worker_plane
        self._own_planes = []

    def state(self) -> list[Piece]:
        """Return this rank's 1/P of the common state, and this worker's own arrays."""
        link, own_planes = self._group.link, dict(zip(("param", "buffer"), self._own_planes))  # noqa: B905
        state = self._update.state
        if self._states_differ:
            own_planes |= {f"optimizer.{name}": x for name, x in state.items()}
        pieces = [
            Piece(f"worker.{link.rank}.{name}", 0, x.size, x) for name, x in own_planes.items()
        ]
        pieces += pieces_of(
            self.replica.arena, {} if self._states_differ else state, link.rank, link.size
        )
        for method in (self._outer, self._delayed):
            pieces += method.pieces(link.rank, link.size) if method is not None else []
        return pieces

    def load(self, saved: SavedState) -> None:
        """Request the whole state; the same number of workers request each its own arrays.

        Another number of workers starts from the means of parameters and of optimizer states.
        """
        state, planes = self._update.state, dict(zip(("param", "buffer"), self._planes))  # noqa: B905
        own_name = partial(saved.own_name, worker=self.worker, workers=self.workers)
        request_state(self.replica.arena, {}, saved)
        for name, x in state.items():
            saved.request(own_name(f"optimizer.{name}"), x)
        self._states_differ = saved.workers == self.workers
        self._params_differ = own_name("param") != "param"
        self._own_planes = [namespace(x).empty_like(x) for x in planes.values()]
        self._own_planes *= self._params_differ
        for name, x in zip(planes, self._own_planes):  # noqa: B905
            saved.request(own_name(name), x)
        for method in (self._outer, self._delayed):
            if method is not None:
                method.load(saved)

    def close(self) -> None:
        """End the communication threads and free their links; collective."""
        self._allreduce_engine.close()
        self._node_group.close()
        if self._delayed is not None:
            self._delayed.close()
