"""Elastic averaging: workers train apart, each on a spring to a centre that servers keep.

Every `period` steps of its own, worker i and the centre c move towards each other by the same d:

    worker i    x_i -> server    a step of its own      <- d    x_i <- x_i - d
    server                       d = a (x_i - c),  c <- c + d

The difference travels while the worker takes a step, so that the wire hides behind compute; the
servers compute it from the x_i that was sent, so that it is the same on both sides. There is no
barrier: workers go at their own pace until all together have done their steps. The centre is
evaluated and saved. A plain SGD step in between makes it EASGD, one with Nesterov's momentum
EAMSGD: both are the recipe's optimizer, of which each worker keeps the state.

Sent per exchange: n bytes by the worker, n by all servers together; n being the bytes of the
parameters. Source: Zhang, Choromanska and LeCun, "Deep learning with elastic averaging SGD", 2015,
algorithms 1 and 2, where a, the *moving rate*, is 0.9 / P for P workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from time import perf_counter
from typing import Annotated

import numpy as np
from pydantic import Field

from hpctrain import config
from hpctrain.checkpoint import Piece
from hpctrain.engines.background import aside
from hpctrain.engines.engine import Flags, Times, Work, ignore_ready
from hpctrain.engines.parameter_server.coordinator import Answer, Report
from hpctrain.engines.parameter_server.engine import ParameterServerEngine
from hpctrain.engines.parameter_server.pacing import OwnPace
from hpctrain.engines.parameter_server.roles import Roles, ServerOptions
from hpctrain.engines.parameter_server.server import total_over
from hpctrain.engines.parameter_server.shard import Order, Shard, Use, finish, ranges
from hpctrain.engines.parameter_server.worker import Worker
from hpctrain.engines.worker_state import Apart
from hpctrain.gradients.arena import Arena
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.replica import Replica
from hpctrain.nn import Sums, add
from hpctrain.optim import Optimizer, sgd
from hpctrain.optim.optimizer import Total
from hpctrain.transport.link import Link
from hpctrain.world import World


@config.options
class Easgd(ServerOptions):
    """`[engine] kind = "easgd"`."""

    period: Annotated[int, Field(ge=1)] = 10  #: steps of a worker from one exchange to the next
    moving_rate: Annotated[float, Field(gt=0, lt=1)] | None = None  #: None: 0.9 / P

    def build(self, world: World, replica: Replica, optimizer: Optimizer) -> EasgdEngine:
        """Return this rank's engine; collective."""
        roles = self.roles(world.size)
        rate = self.moving_rate or 0.9 / len(roles.workers)
        return EasgdEngine(
            world, replica, optimizer, roles, OwnPace(len(roles.workers), self.period, rate)
        )


class EasgdEngine(ParameterServerEngine):
    """See `hpctrain.engines.engine.Engine`; between trainings the arena holds the centre."""

    _working: Elastic | None

    def __init__(
        self,
        world: World,
        replica: Replica,
        optimizer: Optimizer,
        roles: Roles,
        method: OwnPace,
    ):
        self._period = method.period
        self._aside = aside(world.concurrent, "exchange", replica.arena.param)
        super().__init__("easgd", world, replica, optimizer, roles, method)

    def state(self) -> list[Piece]:
        """Return this rank's pieces: servers save the centre, workers their own state."""
        return super().state() + (self._working.apart.pieces() if self._working else [])

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Load the whole state; another number of workers begins at the centre."""
        super().load(arrays)
        if self._working:
            self._working.apart.load(arrays)

    def close(self) -> None:
        """End the thread and free the links; collective."""
        self._aside.shutdown()
        super().close()

    def _worker(self, roles: Roles, optimizer: Optimizer) -> Elastic:
        assert self.worker is not None
        apart = Apart(self.replica.arena, optimizer, self.worker, self.workers)
        push, pull = self._links[:2]
        return Elastic(self._world, self.replica, self.times, push, pull, roles.servers[0],
                       self._cut(roles), self.check, apart, self._period, self._aside)  # fmt: skip

    def _shard(
        self, roles: Roles, optimizer: Optimizer, servers: Link, push: Link, pull: Link
    ) -> Centre:
        arena = self.replica.arena
        own = ranges(arena.param.size, self.servers)[servers.rank]
        return Centre(arena, own, partial(total_over, servers), push, pull, roles.workers)


class Elastic(Worker):
    """A worker: takes steps of its own, and exchanges differences meanwhile."""

    def __init__(
        self,
        world: World,
        replica: Replica,
        times: Times,
        push: Link,
        pull: Link,
        desk: int,
        cut: Sequence[tuple[int, slice]],
        check: GradientCheck,
        apart: Apart,
        period: int,
        aside: Executor,
    ):
        """Exchange in the thread `aside`, which alone uses the links; see Worker for the others."""
        super().__init__(world.rank, replica, times, world.trace, push, pull, desk, cut, check)
        self.apart = apart
        self._period, self._aside = period, aside
        self._sent, self._difference = (np.zeros_like(replica.arena.param) for _ in range(2))

    def work(self, work: Work, start: int) -> None:
        """Work from step `start` on while the desk grants steps; end with the centre."""
        self.flags = Flags()
        self.apart.take_up()
        report = Report(0, 0, start, 0, 0, 0, work.flags())
        grant = self._wait(self._aside.submit(self._meet, report))
        while grant.go:
            sums, grant = self._turn(work, grant)
            work.done(grant.done, sums)
        self.apart.put_aside()
        self._wait(self._aside.submit(self._end, Report(0, 0, grant.step, 0, 0, 0, self.flags)))

    def _turn(self, work: Work, grant: Answer) -> tuple[Sums, Answer]:
        """Take the granted steps; the last one overlaps with the exchange."""
        param, last = self.replica.arena.param, grant.step + grant.go - 1
        sums = self._steps(work, range(grant.step, last))
        due = not self.flags.failed and (last + 1) % self._period == 0
        if due:
            self._sent[...] = param
        flags = self.flags.joined(work.flags())
        report = Report(int(due), 0, grant.step, grant.go, 0, 0, flags)
        exchange = self._aside.submit(self._meet, report)
        sums = add(sums, self._steps(work, range(last, last + 1)))
        grant = self._wait(exchange)
        if due:
            param -= self._difference
        return sums, grant

    def _steps(self, work: Work, steps: range) -> Sums:
        """Take steps of our own, up to the one at which this worker fails."""
        sums, record = Sums(0.0, 0, 0), self.trace.add
        for step in () if self.flags.failed else steps:
            task = work.task(step)
            start = perf_counter()
            ready = self.check.begin(ignore_ready)
            part = self.replica.gradient(task.batch, task.scale, task.key, ready)
            passes = self.check.passes(part)
            computed = perf_counter()
            self.times.compute_s += record("forward, backward", "compute", start, computed)
            if not self.check.goes_on(passes, work.may_drop):
                self.flags = self.flags.failing(self._rank)
                break
            if not passes:
                continue
            sums = add(sums, part)
            self.apart.update(self.replica.arena.param)
            self.times.compute_s += record("update", "compute", computed, perf_counter())
        return sums

    def _meet(self, report: Report) -> Answer:
        """Report, with our parameters where an exchange is due; return the grant of steps."""
        with self.trace.span("exchange", "wire") as wire:
            message = report.encoded()
            sends = [self._push.isend(message, self._desk)]
            if report.gradient:
                sends += [self._push.isend(self._sent[s], rank) for rank, s in self._cut]
            answer = self._answer()
            if report.gradient:
                self._receive(self._difference)
            for send in sends:
                send.wait()
        self.times.wire_s += wire.seconds
        return answer

    def _end(self, report: Report) -> Answer:
        """Report the end; receive the centre, once all workers have come to the end."""
        answer = self._meet(report)
        self._receive(self.replica.arena.param)
        return answer

    def _wait(self, exchange: Future[Answer]) -> Answer:
        with self.trace.span("wait for servers", "wait") as waiting:
            answer = exchange.result()
        self.times.wait_s += waiting.seconds
        return answer


class Centre(Shard):
    """A server's range of the centre."""

    def __init__(
        self, arena: Arena, own: slice, total: Total, push: Link, pull: Link, workers: Sequence[int]
    ):
        # Only workers take gradients: the servers' optimizer is never called.
        super().__init__(arena, own, sgd(0.0), total, push, pull, workers)
        self._difference = np.empty_like(self.param)

    def apply(self, order: Order) -> None:
        """Move towards the worker that pushes, and send it the difference."""
        if order.use != Use.ELASTIC:
            return super().apply(order)
        (worker,) = order.pushed
        for i, (x,) in self._gradients(order.pushed):
            s = self._wire[i]
            finish(self._outgoing[i])  # a send may still read what we are about to change
            d = np.subtract(x, self.param[s], out=self._difference[s])
            d *= order.factor
            self.param[s] += d
            self._outgoing[i].append(self._pull.isend(d, self._workers[worker]))

    def pieces(self) -> list[Piece]:
        """Return this server's part of the centre."""
        return [Piece("param", self._own.start, self._length, self.param)]

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take this server's part of the centre."""
        self.param[...] = arrays["param"][self._own]
