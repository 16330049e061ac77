"""The engine of all regimes with parameter servers: workers on one side, servers on the other.

    worker     compute g     report, push slices ...     reply, pull slices ...     compute g
    server 0                 decide: an event            reply
    servers                  apply: take slices, update,       send slices

The *method* decides which gradients make an update, and which workers may continue: sync.py and
async_.py. The two sides are worker.py and server.py; in shard.py a server updates its slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Protocol

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.collectives import Group
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.core.errors import TransportError, UsageError
from hpctrain.core.xp import on_device
from hpctrain.engines.engine import (
    Flags,
    Times,
    Work,
    broadcast_replica,
    gather_rows,
    request_state,
    sum_in_layer,
    sum_over,
)
from hpctrain.engines.parameter_server.coordinator import Coordinator, Event
from hpctrain.engines.parameter_server.roles import Roles
from hpctrain.engines.parameter_server.server import EventSource, Server, ServerThread
from hpctrain.engines.parameter_server.shard import GradientAction, Shard, shard_ranges, wire_slices
from hpctrain.engines.parameter_server.worker import Worker, WorkerContext
from hpctrain.engines.replay import Recorder
from hpctrain.engines.saved_state import SavedState
from hpctrain.engines.staleness import Staleness, broadcast_staleness
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.replica import Replica
from hpctrain.optim import Optimizer
from hpctrain.optim.optimizer import rate_at
from hpctrain.transport.link import Link
from hpctrain.world import World


class ServerMethod(Protocol):
    """The rule by which gradients make updates and workers continue."""

    asynchronous: bool
    is_lockstep: bool  #: every worker takes part in every step
    push_every: int
    pull_every: int
    updates_per_step: float
    delay_compensation: float
    accumulates: bool  #: several gradients are added before an update
    staleness: Staleness

    @property
    def clocks(self) -> np.ndarray | None:
        """The steps that each worker has done; None if all do the same."""

    def events(self, coordinator: Coordinator, start: int, until: int) -> Iterator[Event]:
        """Yield the events from step `start` to `until`, the last with `Order.last`."""


class ParameterServerEngine:
    """See `hpctrain.engines.engine.Engine`."""

    algorithm = None

    def __init__(
        self,
        name: str,
        world: World,
        replica: Replica,
        optimizer: Optimizer,
        roles: Roles,
        method: ServerMethod,
    ):
        """Create the worker, the server or both that `roles` assigns to this rank; collective."""
        broadcast_replica(world, replica, f"{name}, {roles}")
        self.name = name
        self.replica, self.times, self._method, self._world = replica, Times(), method, world
        self.workers, self.servers = len(roles.workers), len(roles.servers)
        self.worker, server = roles.worker_index(world.rank), roles.server_index(world.rank)
        self.asynchronous = method.asynchronous
        self.check = GradientCheck(replica, self.workers * method.push_every)
        self.staleness: Staleness | None = None
        self.recorder = None if method.is_lockstep else Recorder()
        self._group = world.main
        self._links = [world.link_for("push"), world.link_for("pull")]
        self._workers = Group(world.link_for("workers", int(self.worker is None)))
        servers = world.link_for("servers", int(server is None))
        self._links += [self._workers.link, servers]  # `servers` of a pure worker is unused
        self._worker = None if self.worker is None else self._make_worker(roles, optimizer)
        self._server = None if server is None else self._make_server(roles, optimizer, servers)

    def train(self, work: Work, start: int, until: int) -> tuple[int, Flags]:
        """Train from step `start` to `until`, as workers, servers or both."""
        is_replay = self.recorder is not None and self.recorder.is_replay
        event_source = self._replay_events if is_replay else self._method.events
        events = partial(event_source, start=start, until=until)
        history: list[Event] = []
        if self._worker is None:
            history = self._serve(events, work.flags)
        elif self._server is None:
            self._worker.run(work, start)
        else:
            self._server.category = "wire"
            thread = ServerThread(partial(self._server.serve, events), self._world.fail)
            try:
                self._worker.run(work, start)
            except TransportError:
                thread.join()  # raises the server's error, if that was the cause
                raise
            history = thread.join()
        if history:
            self._record_interval(start, until, history)
        own_flags = work.flags() if self._worker is None else self._worker.flags
        return self._join_flags(history, own_flags)

    @property
    def updates_per_step(self) -> float:
        """The calls of the optimizer while all workers together do one step."""
        return self._method.updates_per_step

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent since the start."""
        return sum(link.bytes_sent for link in (self._group.link, *self._links))

    def sum(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sums of a few float64 over all ranks, the same on each."""
        return sum_over(self._group, numbers)

    def settle(self) -> None:
        """Do nothing: when `train` returns, all workers hold the servers' parameters."""

    def state(self) -> list[Piece]:
        """Return this rank's pieces: a server's shard, worker 0's running statistics."""
        pieces = self._server.shard.pieces() if self._server else []
        buffer, clocks = self.replica.arena.buffer, self._method.clocks
        if self.worker == 0 and buffer.size:
            pieces.append(Piece("buffer", 0, buffer.size, buffer))
        if self._server and self._server.first and clocks is not None:
            pieces.append(Piece("clocks", 0, clocks.size, clocks))
        return pieces

    def load(self, saved: SavedState) -> None:
        """Request this rank's part; clocks of another number of workers are ignored."""
        request_state(self.replica.arena, {}, saved)
        if self._server:
            self._server.shard.load(saved)
        clocks = self._method.clocks
        if clocks is not None and saved.sizes.get("clocks") == clocks.size:
            saved.request_deferred("clocks", clocks)

    def close(self) -> None:
        """Free the links; collective."""
        for link in self._links:
            link.free()

    def _make_worker(self, roles: Roles, optimizer: Optimizer) -> Worker:
        method = self._method
        rate, per_step = optimizer.rate, method.updates_per_step
        return Worker(
            self._worker_context(roles),
            push_every=method.push_every,
            pull_every=method.pull_every,
            local_rate=None if rate is None else lambda step: rate_at(rate, int(step * per_step)),
            sum_over_workers=self._sum_in_layer if method.is_lockstep else None,
            drops_gradients=method.asynchronous,
        )

    def _worker_context(self, roles: Roles) -> WorkerContext:
        return WorkerContext(
            rank=self._world.rank,
            replica=self.replica,
            times=self.times,
            trace=self._world.trace,
            check=self.check,
            push_link=self._links[0],
            pull_link=self._links[1],
            coordinator_rank=roles.servers[0],
            server_slices=self._cut_parameters(roles),
        )

    def _cut_parameters(self, roles: Roles) -> list[tuple[int, slice]]:
        """Return (serving rank, slice) for all parameters, in the order of sending.

        Each server's last slice is sent first: backward computes them in this order. Slices
        alternate between servers; on a device, where slices are copied during backward, the end of
        the plane is sent first.
        """
        param = self.replica.arena.param
        ranges = shard_ranges(param.size, self.servers)
        entries = [
            (i, rank, s)
            for rank, own_range in zip(roles.servers, ranges, strict=True)
            for i, s in enumerate(reversed(wire_slices(own_range, param.itemsize)))
        ]
        entries.sort(key=lambda entry: -entry[2].start if on_device(param) else entry[0])
        return [(rank, s) for _, rank, s in entries]

    def _make_server(self, roles: Roles, optimizer: Optimizer, servers: Link) -> Server:
        push_link, pull_link = self._links[:2]
        if self.worker is not None:
            if not self._world.concurrent:
                raise UsageError(
                    'engine.placement = "colocated" needs an MPI with THREAD_MULTIPLE, and this '
                    'one grants less; set engine.placement = "dedicated"'
                )
            push_link = self._world.view_for("server push", push_link)
            pull_link = self._world.view_for("server pull", pull_link)
            self._links += [push_link, pull_link]
        shard = self._make_shard(roles, optimizer, servers, push_link, pull_link)
        coordinator = Coordinator(push_link, pull_link, roles.workers)
        return Server(shard, coordinator, servers, self.workers, self._world.trace)

    def _make_shard(
        self, roles: Roles, optimizer: Optimizer, servers: Link, push_link: Link, pull_link: Link
    ) -> Shard:
        arena, method = self.replica.arena, self._method
        return Shard(
            arena,
            shard_ranges(arena.param.size, self.servers)[servers.rank],
            optimizer,
            gather_rows=partial(gather_rows, servers),
            push_link=push_link,
            pull_link=pull_link,
            workers=roles.workers,
            delay_compensation=method.delay_compensation,
            accumulates=method.accumulates,
        )

    def _serve(self, events: EventSource, read_own_flags: Callable[[], Flags]) -> list[Event]:
        """Serve in the main thread; its time counts as compute or as waiting."""
        assert self._server is not None
        start, busy_s_before = perf_counter(), self._server.busy_s
        history = self._server.serve(events, read_own_flags)
        busy_s = self._server.busy_s - busy_s_before
        self.times.compute_s += busy_s
        self.times.wait_s += perf_counter() - start - busy_s
        return history

    def _replay_events(self, coordinator: Coordinator, start: int, until: int) -> Iterator[Event]:
        """Yield the events of the log, each after the reports of its workers have arrived."""
        assert self.recorder is not None
        interval, method = self.recorder.next_interval(start, until), self._method
        for event in map(Event.from_json, interval["events"]):
            failed = coordinator.flags.failed
            for worker in event.reporters:
                coordinator.receive_report_from(worker)
            if event.order.action == GradientAction.LATE:
                coordinator.flags = coordinator.flags._replace(failed=failed)
            yield event
        method.staleness = Staleness.from_json(interval["staleness"])
        if method.clocks is not None:
            method.clocks[:] = interval["clocks"]

    def _record_interval(self, start: int, until: int, history: list[Event]) -> None:
        """Record the events of an interval, on the first server."""
        if self.recorder is not None:
            clocks = [] if self._method.clocks is None else self._method.clocks.tolist()
            decisions = {"clocks": clocks, "staleness": self._method.staleness.to_json()}
            self.recorder.record_interval(start, until, events=history, **decisions)

    def _join_flags(self, history: list[Event], flags: Flags) -> tuple[int, Flags]:
        """Return (step reached by the run, as the first server knows it, flags of all ranks)."""
        step = 0
        if self._server and self._server.first:
            step = history[-1].replies[0].run_step
            flags = flags.merge(self._server.coordinator.flags)
        numbers = np.array([step, *flags], np.int64)
        recursive_doubling(self._group, numbers, np.maximum)
        step, flags = int(numbers[0]), Flags(*numbers[1:].tolist())
        if flags.failed and not self._method.asynchronous:
            self.check.undo()  # no gradient of this step was applied
        if not self._method.is_lockstep:
            self._share_worker_state()
        return step, flags

    def _share_worker_state(self) -> None:
        """Send the staleness to all ranks; average the running statistics of the workers."""
        is_first_server = self._server is not None and self._server.first
        local_staleness = self._method.staleness if is_first_server else None
        self.staleness = broadcast_staleness(self._group.link, local_staleness)
        buffer = self.replica.arena.buffer
        if self.worker is not None and buffer.size:
            recursive_doubling(self._workers, buffer, np.add)
            buffer /= self.workers

    def _sum_in_layer(self, numbers: np.ndarray) -> np.ndarray:
        return sum_in_layer(self._workers, numbers, self.times, self._world.trace)
