"""A worker: compute a gradient, report, push it in slices, pull the parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter

import numpy as np

from hpctrain.engines.engine import Flags, Task, Times, Work, identity_total
from hpctrain.engines.parameter_server.coordinator import Reply, Report
from hpctrain.engines.parameter_server.push import Cut, GradientPush
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.replica import Replica
from hpctrain.nn import Sums, add
from hpctrain.optim import Optimizer, sgd
from hpctrain.transport.link import Link
from hpctrain.watch.trace import Trace

SumOverWorkers = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class ServerLinks:
    """A worker's links to the servers."""

    push: Link  #: to the servers: reports and gradients
    pull: Link  #: from the servers: replies and parameters
    coordinator: int  #: the rank of the first server
    cut: Cut  #: (serving rank, slice) in the order of sending


class Worker:
    """One worker: its replica, and its links to the servers."""

    def __init__(
        self,
        *,
        rank: int,
        replica: Replica,
        times: Times,
        trace: Trace,
        servers: ServerLinks,
        check: GradientCheck,
        push_every: int = 1,
        pull_every: int = 1,
        local_rate: Callable[[int], float] | None = None,
        sum_over_workers: SumOverWorkers | None = None,
        drops: bool = False,
    ):
        """Push every `push_every` steps, pull every `pull_every`.

        A gradient that does not pass the `check` is dropped here, if this worker `drops` its own;
        else it reports the failure, and the servers drop all gradients of that step. Between pulls
        the worker's parameters follow its own gradients with `local_rate`. Layers use
        `sum_over_workers`, if all workers take each step together.
        """
        self.replica, self.times, self.trace = replica, times, trace
        self.flags = Flags()  #: flags at the end of training that no report contained
        self.check, self._drops = check, drops
        self._rank, self._coordinator = rank, servers.coordinator
        self._push, self._pull, self._cut = servers.push, servers.pull, servers.cut
        self._push_every, self._pull_every = push_every, pull_every
        self._since_pull = 0
        self._sum = sum_over_workers
        self._local: Optimizer | None = None
        if self._pull_every > 1 and local_rate is not None:
            self._local = sgd(local_rate)

    @cached_property
    def _gradient_push(self) -> GradientPush:
        """The gradients to push; created on first use: a subclass may push something else."""
        return GradientPush(self.replica.arena, self._cut, adds=self._push_every > 1)

    def work(self, work: Work, start: int) -> None:
        """Work from step `start` on while the coordinator grants steps."""
        self._since_pull = 0
        reply = self._exchange(Report(step=start, flags=work.flags()))
        while reply.grant:
            first = reply.step
            sums, report = self._round(work, first)
            reply = self._exchange(report)
            failed = report.flags.failed or (not self._drops and reply.run_step == first)
            if report.push and not failed:
                work.record(reply.run_step, sums)

    def _round(self, work: Work, first: int) -> tuple[Sums, Report]:
        """Compute the gradients of one push, from step `first` on."""
        sums, flags, batch_targets, passes = Sums(0.0, 0, 0), work.flags(), 0, True
        for step in range(first, first + self._push_every):
            task = work.task(step)
            part, passes = self._gradient(task, step, last=step == first + self._push_every - 1)
            if not passes:
                break
            sums = add(sums, part)
            batch_targets += round(1 / task.scale)
        pushes = True
        if self._drops and self.check.may_continue(passes, work.max_drops, self._push_every):
            pushes = passes
        elif not passes:
            flags = flags.with_failure(self._rank)
        if not pushes:
            self._gradient_push.clear()
        self._since_pull += self._push_every
        return sums, Report(
            step=first,
            flags=flags,
            steps=self._push_every,
            push=pushes,
            pull=self._since_pull >= self._pull_every,
            targets=sums.count,
            batch_targets=batch_targets,
        )

    def _gradient(self, task: Task, step: int, last: bool) -> tuple[Sums, bool]:
        """Compute one gradient, `last` of a push or not; return its sums and whether it passes."""
        key, arena = task.key, self.replica.arena
        if self._sum is not None:
            key = key._replace(sum_over_ranks=self._sum)
        with self.times.compute(self.trace, "forward, backward"):
            ready = self.check.begin(self._gradient_push.on_ready_for(last))
            sums = self.replica.gradient(task.batch, task.scale, key, ready)
            self._gradient_push.add(last)
            passes = self.check.passes(sums)
            if self._local is not None and passes:
                state = {"step": np.array([step])}
                self._local.update(arena.grad, state, arena.param, arena.slots, identity_total)
        return sums, passes

    def _exchange(self, report: Report) -> Reply:
        """Report, push the gradient, pull the parameters if due; return the reply."""
        start, message, gradient = perf_counter(), report.encode(), self._gradient_push
        sends = [self._push.isend(message, self._coordinator)]
        if report.push:
            sends += [self._push.isend(x, rank) for rank, x in gradient.slices(self._push)]
        reply = self._receive_reply()
        if report.pull or not reply.grant:
            self._receive(self.replica.arena.param)
        for send in sends:
            send.wait()
        if report.push:
            gradient.clear()
        spent = self.trace.add("push, pull", "wait", start, perf_counter())
        self.times.wait_s += spent
        self.times.wire_s += spent
        return reply

    def _receive_reply(self) -> Reply:
        x = np.zeros(len(Reply._fields), np.int64)
        self._pull.irecv(x, self._coordinator).wait()
        return Reply(*x.tolist())

    def _receive(self, buffer: np.ndarray) -> None:
        """Receive all slices into `buffer`."""
        self._since_pull = 0
        receives = [self._pull.irecv(buffer[s], rank) for rank, s in self._cut]
        for receive in receives:
            receive.wait()
