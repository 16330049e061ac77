"""A worker: compute a gradient, report, push it in slices, pull the parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hpctrain.engines.base import PipeRow
from hpctrain.engines.engine import Flags, Task, Times, Work
from hpctrain.engines.parameter_server.coordinator import Reply, Report, ServerMethod
from hpctrain.engines.parameter_server.push import GradientPush, ServerSlices
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.replica import Replica
from hpctrain.nn import Sums, add
from hpctrain.optim import Optimizer
from hpctrain.transport.link import Link, Request, wait_all
from hpctrain.watch.trace import Trace


@dataclass(kw_only=True, eq=False)
class Worker:
    """A worker that pushes gradients and pulls parameters."""

    row: PipeRow
    replica: Replica
    times: Times
    trace: Trace
    check: GradientCheck
    method: ServerMethod
    push_link: Link  #: to the servers: reports and gradients
    pull_link: Link  #: from the servers: replies and parameters
    coordinator_rank: int  #: the rank of the first server
    server_slices: ServerSlices
    #: updates this worker's parameters between two pulls
    local_optimizer: Optimizer | None = None
    #: for layers, if all workers take each step together
    sum_over_workers: Callable[[np.ndarray], np.ndarray] | None = None
    #: flags at the end of training that no report contained
    flags: Flags = field(default=Flags(), init=False)
    _steps_since_pull: int = field(default=0, init=False)

    @cached_property
    def _gradient_push(self) -> GradientPush:
        """The gradients to push; created on first use: a subclass may push parameters instead."""
        accumulates = self.method.push_every > 1
        return GradientPush(self.replica.arena, self.server_slices, accumulates)

    def run(self, work: Work, start: int) -> None:
        """Train from step `start` on while the coordinator grants steps."""
        self._steps_since_pull = 0
        flags = self.row.join(work.flags())
        reply = self._exchange_with_servers(Report(step=start, flags=flags))
        while reply.grant:
            first_step = reply.step
            sums, report = self._compute_round(work, first_step)
            reply = self._exchange_with_servers(report)
            is_updated = self.method.asynchronous or reply.run_step != first_step
            if report.has_push and not report.flags.failed and is_updated:
                work.record(reply.run_step, sums)

    def _compute_round(self, work: Work, first_step: int) -> tuple[Sums, Report]:
        """Compute the gradients of a push, from step `first_step` on."""
        sums: Sums = {}
        flags, targets, batch_targets = Flags(), 0.0, 0
        push_every = self.method.push_every
        last_step = first_step + push_every - 1
        for step in range(first_step, last_step + 1):
            task = work.task(step)
            flags = flags.merge(work.flags())  # after the task, whose samples may be unreadable
            step_sums, flags = self._compute_gradient(task, step, flags, step == last_step)
            if flags.failed:
                break
            sums = add(sums, step_sums)
            batch_targets += round(1 / task.scale)
            # Not the count of the loss, which may be a sum of weights.
            targets += task.batch.n / max(task.key.samples, 1) / task.scale
        has_push, is_finite = True, not flags.failed
        # An asynchronous worker itself drops a gradient that is not finite; others report the
        # failure, and the servers drop all gradients of that step.
        if self.method.asynchronous and self.check.may_continue(
            is_finite, work.max_drops, push_every
        ):
            has_push, flags = is_finite, flags._replace(failed=0)
        if not has_push:
            self._gradient_push.clear()
        self._steps_since_pull += push_every
        return sums, Report(
            step=first_step,
            flags=flags,
            steps=push_every,
            has_push=has_push,
            wants_pull=self._steps_since_pull >= self.method.pull_every,
            targets=round(targets),
            batch_targets=batch_targets,
        )

    def _compute_gradient(
        self, task: Task, step: int, flags: Flags, is_last: bool
    ) -> tuple[Sums, Flags]:
        """Compute a gradient; `is_last`: it is the last gradient before a push.

        Return its sums, and `flags` of the row with a failure if the gradient is not finite.
        """
        key, arena = task.key, self.replica.arena
        if self.sum_over_workers is not None:
            key = key._replace(sum_over_ranks=self.sum_over_workers)
        with self.times.compute(self.trace, "forward, backward"):
            on_ready = self.check.begin(self._gradient_push.make_on_ready(is_last))
            sums = self.replica.gradient(task.batch, task.scale, key, on_ready)
            self._gradient_push.finish_gradient(is_last)
            flags = self.row.join_check(self.check.passes(sums), flags)
            if self.local_optimizer is not None and not flags.failed:
                self.local_optimizer.update(
                    arena.grad,
                    {"step": np.array([step])},
                    arena.param,
                    arena.layout,
                    arena.gather_rows,
                )
        return sums, flags

    def _exchange_with_servers(self, report: Report) -> Reply:
        """Report, push the gradient, pull the parameters if due; return the reply."""
        gradient, link = self._gradient_push, self.push_link
        with self.times.wait(self.trace, "push, pull", on_wire=True):
            send_requests = self._send_report(report)
            if report.has_push:
                send_requests += [link.isend(x, rank) for rank, x in gradient.slices(link)]
            reply = self._share_reply(self._receive_reply())
            if report.wants_pull or not reply.grant:
                self._receive_slices(self.replica.arena.param)
            wait_all(send_requests)
            if report.has_push:
                gradient.clear()
        return reply

    def _send_report(self, report: Report) -> list[Request]:
        """Report for this row, on its first rank."""
        if not self.row.is_first:
            return []
        return [self.push_link.isend(report.encode(), self.coordinator_rank)]

    def _receive_reply(self) -> np.ndarray:
        """Return the message of the coordinator, on the first rank of this row."""
        message = np.zeros(len(Reply._fields), np.int64)
        if self.row.is_first:
            self.pull_link.irecv(message, self.coordinator_rank).wait()
        return message

    def _share_reply(self, message: np.ndarray) -> Reply:
        """Return the reply to this row; the main thread calls."""
        return Reply(*self.row.share(message).tolist())

    def _receive_slices(self, buffer: np.ndarray) -> None:
        """Receive all slices into `buffer`."""
        self._steps_since_pull = 0
        wait_all([self.pull_link.irecv(buffer[s], rank) for rank, s in self.server_slices])
