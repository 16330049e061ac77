"""A worker: compute a gradient, report, push it in slices, pull the parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from time import perf_counter

import numpy as np

from hpctrain.engines.engine import Flags, Task, Times, Work, whole
from hpctrain.engines.parameter_server.coordinator import Answer, Report
from hpctrain.engines.parameter_server.push import Cut, Outbox
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.replica import Replica
from hpctrain.nn import Sums, add
from hpctrain.optim import Optimizer, sgd
from hpctrain.transport.link import Link
from hpctrain.watch.trace import Trace

SumOverWorkers = Callable[[np.ndarray], np.ndarray]


class Worker:
    """One worker: its replica, and its links to the servers."""

    def __init__(
        self,
        rank: int,
        replica: Replica,
        times: Times,
        trace: Trace,
        push: Link,
        pull: Link,
        desk: int,
        cut: Cut,
        check: GradientCheck,
        rhythm: tuple[int, int] = (1, 1),
        local_rate: Callable[[int], float] | None = None,
        sum_over_workers: SumOverWorkers | None = None,
        drops: bool = False,
    ):
        """Report to rank `desk`; `cut` gives (serving rank, slice) in the order of sending.

        A gradient that does not pass the `check` is dropped here, if this worker `drops` its own;
        else it reports the failure, and the servers drop all gradients of that step.
        `rhythm`: steps between pushes and between pulls. Where steps lie between pulls, this
        worker's parameters follow its own gradients with `local_rate`. `sum_over_workers` is for
        layers, where all workers take each step together.
        """
        self.replica, self.times, self.trace = replica, times, trace
        self.flags = Flags()  #: flags for the end of training that were in no report
        self.check, self._drops = check, drops
        self._rank, self._desk, self._push, self._pull, self._cut = rank, desk, push, pull, cut
        self._push_every, self._pull_every = rhythm
        self._since_pull = 0
        self._sum = sum_over_workers
        self._local: Optimizer | None = None
        if self._pull_every > 1 and local_rate is not None:
            self._local = sgd(local_rate)

    @cached_property
    def _outbox(self) -> Outbox:
        """The gradients to be pushed; made on first use: a subclass may push something else."""
        return Outbox(self.replica.arena, self._cut, adds=self._push_every > 1)

    def work(self, work: Work, start: int) -> None:
        """Work from step `start` on while the desk grants steps."""
        self._since_pull = 0
        answer = self._exchange(Report(0, 0, start, 0, 0, 0, work.flags()))
        while answer.go:
            first = answer.step
            sums, report = self._round(work, first)
            answer = self._exchange(report)
            failed = report.flags.failed or (not self._drops and answer.done == first)
            if report.gradient and not failed:
                work.done(answer.done, sums)

    def _round(self, work: Work, first: int) -> tuple[Sums, Report]:
        """Compute the gradients of one push, from step `first` on."""
        sums, flags, of_targets, passes = Sums(0.0, 0, 0), work.flags(), 0, True
        for step in range(first, first + self._push_every):
            task = work.task(step)
            part, passes = self._gradient(task, step, last=step == first + self._push_every - 1)
            if not passes:
                break
            sums = add(sums, part)
            of_targets += round(1 / task.scale)
        pushes = True
        if self._drops and self.check.goes_on(passes, work.may_drop, self._push_every):
            pushes = passes
        elif not passes:
            flags = flags.failing(self._rank)
        if not pushes:
            self._outbox.clear()
        self._since_pull += self._push_every
        wants = self._since_pull >= self._pull_every
        numbers = (int(pushes), int(wants), first, self._push_every, sums.count, of_targets)
        return sums, Report(*numbers, flags)

    def _gradient(self, task: Task, step: int, last: bool) -> tuple[Sums, bool]:
        """Compute one gradient, `last` of a push or not; return its sums and whether it passes."""
        start, waited = perf_counter(), self.times.wait_s
        key = task.key
        if self._sum is not None:
            key = key._replace(sum_over_ranks=self._sum)
        arena = self.replica.arena
        ready = self.check.begin(self._outbox.listener(last))
        sums = self.replica.gradient(task.batch, task.scale, key, ready)
        self._outbox.take(last)
        passes = self.check.passes(sums)
        if self._local is not None and passes:
            state = {"step": np.array([step])}
            self._local.update(arena.grad, state, arena.param, arena.slots, whole)
        computed = self.trace.add("forward, backward", "compute", start, perf_counter())
        self.times.compute_s += computed - (self.times.wait_s - waited)  # in layers, for others
        return sums, passes

    def _exchange(self, report: Report) -> Answer:
        """Report, push the gradient, pull the parameters if due; return the answer."""
        start, message = perf_counter(), report.encoded()
        sends = [self._push.isend(message, self._desk)]
        if report.gradient:
            sends += [self._push.isend(x, rank) for rank, x in self._outbox.leave(self._push)]
        answer = self._answer()
        if report.wants or not answer.go:
            self._receive(self.replica.arena.param)
        for send in sends:
            send.wait()
        if report.gradient:
            self._outbox.clear()
        spent = self.trace.add("push, pull", "wait", start, perf_counter())
        self.times.wait_s += spent
        self.times.wire_s += spent
        return answer

    def _answer(self) -> Answer:
        x = np.zeros(len(Answer._fields), np.int64)
        self._pull.irecv(x, self._desk).wait()
        return Answer(*x.tolist())

    def _receive(self, into: np.ndarray) -> None:
        """Receive all slices into `into`."""
        self._since_pull = 0
        receives = [self._pull.irecv(into[s], rank) for rank, s in self._cut]
        for receive in receives:
            receive.wait()
