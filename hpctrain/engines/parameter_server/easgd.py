"""Elastic averaging: workers train apart, each on a spring to a centre that servers keep.

Every `period` steps of its own, worker i and the centre c move towards each other by the same d:

    worker i    x_i -> server    a step of its own      <- d    x_i <- x_i - d
    server                       d = a (x_i - c),  c <- c + d

The difference is exchanged while the worker takes a step, so that the wire hides behind compute.
The servers compute it from the x_i that was sent, so that it is the same on both sides. There is no
barrier: workers go at their own pace until all together have done the steps of the run. The centre
is evaluated and saved. With plain SGD steps in between the method is EASGD, with Nesterov's
momentum EAMSGD: both are the recipe's optimizer, whose state each worker has to itself.

Sent per exchange: n bytes by the worker, n by all servers together; n being the bytes of the
parameters. Source: Zhang, Choromanska and LeCun, "Deep learning with elastic averaging SGD", 2015,
algorithms 1 and 2, where a, the *moving rate*, is 0.9 / P for P workers.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from functools import partial
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from hpctrain import config
from hpctrain.checkpoint import Piece
from hpctrain.engines.background import background_executor
from hpctrain.engines.engine import Flags, Times, Work, gather_rows
from hpctrain.engines.parameter_server.coordinator import Reply, Report
from hpctrain.engines.parameter_server.engine import ParameterServerEngine
from hpctrain.engines.parameter_server.pacing import PeriodicMethod
from hpctrain.engines.parameter_server.roles import Roles, ServerOptions
from hpctrain.engines.parameter_server.shard import Order, Shard, Use, ranges, wait_all
from hpctrain.engines.parameter_server.worker import ServerLinks, Worker
from hpctrain.engines.saved_state import SavedState
from hpctrain.engines.worker_state import WorkerState
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.replica import Replica, ignore_ready
from hpctrain.nn import Sums, add
from hpctrain.optim import Optimizer, sgd
from hpctrain.transport.link import Link
from hpctrain.watch.trace import Trace
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
            world, replica, optimizer, roles, PeriodicMethod(len(roles.workers), self.period, rate)
        )


class EasgdEngine(ParameterServerEngine):
    """See `hpctrain.engines.engine.Engine`; between trainings the arena holds the centre."""

    _worker: ElasticWorker | None

    def __init__(
        self,
        world: World,
        replica: Replica,
        optimizer: Optimizer,
        roles: Roles,
        method: PeriodicMethod,
    ):
        self._period = method.period
        self._executor = background_executor(world.concurrent, "exchange", replica.arena.param)
        super().__init__("easgd", world, replica, optimizer, roles, method)

    def state(self) -> list[Piece]:
        """Return this rank's pieces: servers save the centre, workers their own state."""
        return super().state() + (self._worker.worker_state.pieces() if self._worker else [])

    def load(self, saved: SavedState) -> None:
        """Request the whole state; another number of workers begins at the centre."""
        super().load(saved)
        if self._worker:
            self._worker.worker_state.load(saved)

    def close(self) -> None:
        """End the thread and free the links; collective."""
        self._executor.shutdown()
        super().close()

    def _make_worker(self, roles: Roles, optimizer: Optimizer) -> ElasticWorker:
        assert self.worker is not None
        return ElasticWorker(
            rank=self._world.rank,
            replica=self.replica,
            times=self.times,
            trace=self._world.trace,
            servers=self._server_links(roles),
            check=self.check,
            worker_state=WorkerState(self.replica.arena, optimizer, self.worker, self.workers),
            period=self._period,
            executor=self._executor,
        )

    def _make_shard(
        self, roles: Roles, optimizer: Optimizer, servers: Link, push: Link, pull: Link
    ) -> CentreShard:
        arena = self.replica.arena
        shard_range = ranges(arena.param.size, self.servers)[servers.rank]
        total = partial(gather_rows, servers)
        # Only workers take gradients: the servers' optimizer is never called.
        return CentreShard(
            arena, shard_range, sgd(0.0), total=total, push=push, pull=pull, workers=roles.workers
        )


class ElasticWorker(Worker):
    """A worker that takes steps of its own, and exchanges differences meanwhile."""

    def __init__(
        self,
        *,
        rank: int,
        replica: Replica,
        times: Times,
        trace: Trace,
        servers: ServerLinks,
        check: GradientCheck,
        worker_state: WorkerState,
        period: int,
        executor: Executor,
    ):
        """Exchange every `period` steps in the thread of `executor`, the only user of the links."""
        super().__init__(
            rank=rank, replica=replica, times=times, trace=trace, servers=servers, check=check
        )
        self.worker_state = worker_state
        self._period, self._executor = period, executor
        self._sent, self._difference = (np.zeros_like(replica.arena.param) for _ in range(2))

    def work(self, work: Work, start: int) -> None:
        """Work from step `start` on while the coordinator grants steps; receive the centre."""
        self.flags = Flags()
        self.worker_state.restore_planes()
        report = Report(step=start, flags=work.flags())
        reply = self._wait(self._executor.submit(self._exchange, report))
        while reply.grant:
            sums, reply = self._train_round(work, reply)
            work.record(reply.run_step, sums)
        self.worker_state.save_planes()
        report = Report(step=reply.step, flags=self.flags)
        self._wait(self._executor.submit(self._final_exchange, report))

    def _train_round(self, work: Work, reply: Reply) -> tuple[Sums, Reply]:
        """Run the granted steps; overlap the last one with the exchange."""
        param, last_step = self.replica.arena.param, reply.step + reply.grant - 1
        sums = self._steps(work, range(reply.step, last_step))
        exchange_is_due = not self.flags.failed and (last_step + 1) % self._period == 0
        if exchange_is_due:
            self._sent[...] = param
        flags = self.flags.merged(work.flags())
        report = Report(step=reply.step, flags=flags, steps=reply.grant, push=exchange_is_due)
        exchange = self._executor.submit(self._exchange, report)
        sums = add(sums, self._steps(work, range(last_step, last_step + 1)))
        reply = self._wait(exchange)
        if exchange_is_due:
            param -= self._difference
        return sums, reply

    def _steps(self, work: Work, steps: range) -> Sums:
        """Run local steps, up to the one at which this worker fails."""
        sums = Sums(0.0, 0, 0)
        for step in () if self.flags.failed else steps:
            task = work.task(step)
            with self.times.compute(self.trace, "forward, backward"):
                ready = self.check.begin(ignore_ready)
                part = self.replica.gradient(task.batch, task.scale, task.key, ready)
                passes = self.check.passes(part)
            if not self.check.may_continue(passes, work.max_drops):
                self.flags = self.flags.with_failure(self._rank)
                break
            if not passes:
                continue
            sums = add(sums, part)
            with self.times.compute(self.trace, "update"):
                self.worker_state.update(self.replica.arena.param)
        return sums

    def _exchange(self, report: Report) -> Reply:
        """Report, push the parameters if an exchange is due; return the reply."""
        with self.trace.span("exchange", "wire") as wire:
            message = report.encode()
            sends = [self._push.isend(message, self._coordinator)]
            if report.push:
                sends += [self._push.isend(self._sent[s], rank) for rank, s in self._cut]
            reply = self._receive_reply()
            if report.push:
                self._receive(self._difference)
            for send in sends:
                send.wait()
        self.times.wire_s += wire.seconds
        return reply

    def _final_exchange(self, report: Report) -> Reply:
        """Report the end; receive the centre, after all workers have reported theirs."""
        reply = self._exchange(report)
        self._receive(self.replica.arena.param)
        return reply

    def _wait(self, exchange: Future[Reply]) -> Reply:
        with self.trace.span("wait for servers", "wait") as waiting:
            reply = exchange.result()
        self.times.wait_s += waiting.seconds
        return reply


class CentreShard(Shard):
    """A server's range of the centre."""

    def __init__(self, *args: Any, **keys: Any):
        super().__init__(*args, **keys)
        self._difference = np.empty_like(self.param)

    def apply(self, order: Order) -> None:
        """Move towards the parameters of the pushing worker, and send it the difference."""
        if order.use != Use.ELASTIC:
            return super().apply(order)
        (worker,) = order.pushed
        for i, (x,) in self._gradients(order.pushed):
            s = self._wire[i]
            wait_all(self._outgoing[i])  # a send may still read the difference
            d = np.subtract(x, self.param[s], out=self._difference[s])
            d *= order.factor
            self.param[s] += d
            self._outgoing[i].append(self._pull.isend(d, self._workers[worker]))

    def pieces(self) -> list[Piece]:
        """Return this server's part of the centre."""
        return [Piece("param", self._own.start, self._length, self.param)]

    def load(self, saved: SavedState) -> None:
        """Request this server's part of the centre."""
        saved.request("param", self.param, self._own.start, self._length)
