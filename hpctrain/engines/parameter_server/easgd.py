"""Elastic averaging: workers train apart; a spring force ties each to a centre on the servers.

Every `period` steps of its own, worker i and the centre c move towards each other by the same d:

    worker i    x_i -> server    a step of its own      <- d    x_i <- x_i - d
    server                       d = a (x_i - c),  c <- c + d

The exchange runs while the worker takes a step, so that compute hides the communication. The
servers compute d from the x_i that was sent, so that d is the same on both sides. There is no
barrier: workers go at their own pace until all together have done the steps of the run. The centre
is evaluated and saved. With local steps of plain SGD the method is EASGD, with Nesterov's momentum
EAMSGD: the recipe's optimizer makes these steps, and each worker has its own optimizer state.

Sent per exchange: n bytes by the worker, n by all servers together; n is the size of the parameters
in bytes. Source: Zhang, Choromanska and LeCun, "Deep learning with elastic averaging SGD", 2015,
algorithms 1 and 2, where a, the *moving rate*, is 0.9 / P for P workers.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from hpctrain.checkpoint import Piece
from hpctrain.core import config
from hpctrain.engines.background import background_executor
from hpctrain.engines.engine import Flags, Work
from hpctrain.engines.parameter_server.coordinator import PeriodicMethod, Reply, Report
from hpctrain.engines.parameter_server.engine import ParameterServerEngine
from hpctrain.engines.parameter_server.roles import Roles, ServerOptions, WorkerLinks
from hpctrain.engines.parameter_server.shard import (
    GradientAction,
    Order,
    Shard,
    drain,
)
from hpctrain.engines.parameter_server.worker import Worker
from hpctrain.engines.saved_state import SavedState, plane_pieces, request_plane
from hpctrain.engines.worker_state import WorkerState
from hpctrain.gradients.arena import Arena
from hpctrain.gradients.replica import Replica, ignore_ready
from hpctrain.nn import Sums, add
from hpctrain.optim import Optimizer, sgd
from hpctrain.transport.link import wait_all
from hpctrain.world import World


@config.options
class Easgd(ServerOptions):
    """`[engine] kind = "easgd"`."""

    period: Annotated[int, Field(ge=1)] = 10  #: steps of a worker from one exchange to the next
    moving_rate: Annotated[float, Field(gt=0, lt=1)] | None = None  #: None: 0.9 / P

    def build(self, world: World, replica: Replica, optimizer: Optimizer) -> EasgdEngine:
        """Return this rank's engine; collective."""
        roles = self.roles(world.size)
        moving_rate = self.moving_rate or 0.9 / len(roles.workers)
        return EasgdEngine(
            world,
            replica,
            optimizer,
            roles,
            PeriodicMethod(len(roles.workers), self.period, moving_rate),
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
        self._shard_class = CentreShard
        self._executor = background_executor(world.concurrent, "exchange", replica.arena.param)
        super().__init__("easgd", world, replica, optimizer, roles=roles, method=method)

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
        arena = self.replica.arena
        state = optimizer.init(arena.param)
        return ElasticWorker(
            **self._worker_fields(roles),
            worker_state=WorkerState(arena, optimizer, state, self.worker, self.workers),
            executor=self._executor,
        )


@dataclass(kw_only=True, eq=False)
class ElasticWorker(Worker):
    """A worker that trains apart and exchanges differences with the centre."""

    worker_state: WorkerState
    method: PeriodicMethod
    executor: Executor  #: only its thread uses the links

    def __post_init__(self) -> None:
        """Allocate the messages of an exchange."""
        param = self.replica.arena.param
        self._sent_param, self._difference = np.zeros_like(param), np.zeros_like(param)

    def run(self, work: Work, start: int) -> None:
        """Train from step `start` on while the coordinator grants steps; receive the centre."""
        self.flags = Flags()
        self.worker_state.restore_planes()
        report = Report(step=start, flags=self.row.join(work.flags()))
        reply = self._wait_for_reply(self.executor.submit(self._exchange, report))
        while reply.grant:
            sums, reply = self._train_round(work, reply)
            work.record(reply.run_step, sums)
        self.worker_state.save_planes()
        report = Report(step=reply.step, flags=self.flags)
        self._wait_for_reply(self.executor.submit(self._receive_centre, report))

    def _train_round(self, work: Work, reply: Reply) -> tuple[Sums, Reply]:
        """Run the granted steps; overlap the last one with the exchange."""
        param, last_step = self.replica.arena.param, reply.step + reply.grant - 1
        sums = self._run_steps(work, range(reply.step, last_step))
        exchange_is_due = not self.flags.failed and (last_step + 1) % self.method.period == 0
        if exchange_is_due:
            self._sent_param[...] = param
        flags = self.row.join(self.flags.merge(work.flags()))
        report = Report(step=reply.step, flags=flags, steps=reply.grant, has_push=exchange_is_due)
        exchange = self.executor.submit(self._exchange, report)
        sums = add(sums, self._run_steps(work, range(last_step, last_step + 1)))
        reply = self._wait_for_reply(exchange)
        if exchange_is_due:
            param -= self._difference
        return sums, reply

    def _run_steps(self, work: Work, steps: range) -> Sums:
        """Run local steps, up to the one at which this worker fails."""
        sums: Sums = {}
        for step in () if self.flags.failed else steps:
            task = work.task(step)
            with self.times.compute(self.trace, "forward, backward"):
                on_ready = self.check.begin(ignore_ready)
                step_sums = self.replica.gradient(task.batch, task.scale, task.key, on_ready)
                is_finite = self.check.passes(step_sums)
            failure = self.row.join_check(is_finite)
            if not self.check.may_continue(not failure.failed, work.max_drops):
                self.flags = self.flags.merge(failure)
                break
            if failure.failed:
                continue
            sums = add(sums, step_sums)
            with self.times.compute(self.trace, "update"):
                self.worker_state.update(self.replica.arena.param)
        return sums

    def _exchange(self, report: Report) -> np.ndarray:
        """Report, push the parameters if an exchange is due; return the message with the reply."""
        with self.trace.span("exchange", "wire") as wire_span:
            send_requests = self._send_report(report)
            if report.has_push:
                send_requests += [
                    self.push_link.isend(self._sent_param[s], rank)
                    for rank, s in self.server_slices
                ]
            message = self._receive_reply()
            if report.has_push:
                self._receive_slices(self._difference)
            wait_all(send_requests)
        self.times.wire_s += wire_span.seconds
        return message

    def _receive_centre(self, report: Report) -> np.ndarray:
        """Report the end of training; receive the centre once all workers have ended."""
        message = self._exchange(report)
        self._receive_slices(self.replica.arena.param)
        return message

    def _wait_for_reply(self, exchange: Future[np.ndarray]) -> Reply:
        with self.times.wait(self.trace, "wait for servers"):
            return self._share_reply(exchange.result())


class CentreShard(Shard):
    """A server's range of the centre; only workers update with gradients."""

    def __init__(
        self,
        arena: Arena,
        own_range: slice,
        optimizer: Optimizer,
        links: WorkerLinks,
        **kwargs: Any,
    ):
        super().__init__(arena, own_range, sgd(0.0), links, **kwargs)
        self._difference = np.empty_like(self.param)

    def apply(self, order: Order) -> None:
        """Move towards the parameters of the pushing worker; send the difference back."""
        if order.action != GradientAction.ELASTIC:
            return super().apply(order)
        (worker,) = order.pushing_workers
        for i, (worker_param,) in self._receive_gradients(order.pushing_workers):
            part = self._wire_slices[i]
            drain(self._send_requests[i])  # a send may still read the difference
            centre, difference = self.param[part], self._difference[part]
            np.subtract(worker_param, centre, out=difference)
            difference *= order.factor
            centre += difference
            self._send_requests[i].append(
                self._links.pull.isend(difference, self._links.ranks[worker])
            )

    def pieces(self) -> list[Piece]:
        """Return this server's part of the centre."""
        return plane_pieces(self._arena, "param", self.param, self._own_range.start)

    def load(self, saved: SavedState) -> None:
        """Request this server's part of the centre."""
        request_plane(self._arena, "param", self.param, saved.request, self._own_range.start)
