"""The engine of regimes with parameter servers: workers on one side, servers on the other.

    worker     compute g     report, push slices ...     reply, pull slices ...     compute g
    server 0                 decide: an event            reply
    servers                  apply: take slices, update,       send slices

On a mesh a worker is a row, and each server has a range of the layers of its column; the first
server of pipe rank 0 decides for all columns, see PipeRow in engines/base.py.

The *method* decides which gradients make an update, and which workers may continue: sync.py and
async_.py. The two sides are worker.py and server.py; in shard.py a server updates its slices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.collectives import Group
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import on_device
from hpctrain.engines.base import EngineBase
from hpctrain.engines.engine import (
    Flags,
    Work,
    gather_rows,
    sum_in_layer,
)
from hpctrain.engines.parameter_server.coordinator import Coordinator, Event, ServerMethod
from hpctrain.engines.parameter_server.roles import Roles, WorkerLinks
from hpctrain.engines.parameter_server.server import EventSource, Server, server_thread
from hpctrain.engines.parameter_server.shard import Shard, shard_ranges, wire_slices
from hpctrain.engines.parameter_server.worker import Worker
from hpctrain.engines.replay import Recorder
from hpctrain.engines.saved_state import SavedState, array_pieces, request_state
from hpctrain.engines.staleness import broadcast_staleness
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.replica import Replica
from hpctrain.optim import Optimizer, sgd
from hpctrain.optim.optimizer import rate_at
from hpctrain.transport.link import Link
from hpctrain.world import World
from hpctrain.world.grid import Grid


class ParameterServerEngine(EngineBase):
    """See `hpctrain.engines.engine.Engine`."""

    _shard_class: type[Shard] = Shard

    def __init__(
        self,
        name: str,
        world: World,
        replica: Replica,
        optimizer: Optimizer,
        *,
        roles: Roles,
        method: ServerMethod,
    ):
        """Create the worker, the server or both that `roles` assigns to this rank; collective."""
        super().__init__(world, replica, f"{name}, {roles}")
        self.name, self._method = name, method
        self.workers, self.servers = len(roles.workers), len(roles.servers)
        self.worker, server = roles.indexes(world.rank)
        self.asynchronous, self.updates_per_step = method.asynchronous, method.updates_per_step
        self.keeps_step = method.is_lockstep
        self.check = GradientCheck(replica, self.workers * method.push_every)
        self.recorder = None if method.is_lockstep else Recorder()
        self._links = [world.threads.link_for("push"), world.threads.link_for("pull")]
        self._workers = Group(world.threads.link_for("workers", int(self.worker is None)))
        servers = world.threads.link_for("servers", int(server is None))
        self._links += [self._workers.link, servers]  # `servers` of a pure worker is unused
        self._order_link = (
            servers if world.grid is None else self._make_order_link(world.grid, server)
        )
        self._worker = None if self.worker is None else self._make_worker(roles, optimizer)
        self._server = None if server is None else self._make_server(roles, optimizer, servers)

    def train(self, work: Work, start: int, until: int) -> tuple[int, Flags]:
        """Train from step `start` to `until`, as a worker, a server or both."""
        events = partial(
            self._method.interval_events, recorder=self.recorder, start=start, until=until
        )
        history: list[Event] = []
        if self._worker is None:
            history = self._serve(events, work.flags)
        elif self._server is None:
            self._worker.run(work, start)
        else:
            self._server.category = "wire"
            serve = partial(self._server.serve, events)
            with server_thread(serve, self._world) as result:
                self._worker.run(work, start)
            history = result.result()
        if history and self.recorder is not None:
            self._method.record_interval(self.recorder, start, until, history)
        own_flags = work.flags() if self._worker is None else self._worker.flags
        return self._join_flags(history, own_flags)

    def settle(self) -> None:
        """Share the buffers of workers that step together; other regimes share them in `train`."""
        if self.worker is not None and self._method.is_lockstep:
            self._share_buffers(self._workers)

    def state(self) -> list[Piece]:
        """Return this rank's pieces of a checkpoint: a server's shard, worker 0's statistics."""
        pieces = self._server.shard.pieces() if self._server else []
        arena = self.replica.arena
        if self.worker == 0 and arena.buffer.size:
            pieces += array_pieces(arena, "buffer", arena.buffer, 0, 1)
        is_coordinator = self._server and self._server.first
        return pieces + (self._method.pieces() if is_coordinator else [])

    def load(self, saved: SavedState) -> None:
        """Request this rank's part."""
        request_state(self.replica.arena, {}, saved)
        if self._server:
            self._server.shard.load(saved)
        self._method.load(saved)

    def _make_order_link(self, grid: Grid, server: int | None) -> Link:
        """Link the servers of every column, in the order of pipe ranks; collective."""
        position = grid.pipe.link.rank * self._world.size + self._world.rank
        link = self._world.voters.link.split(int(server is None), position)
        self._links += self._world.threads.register("orders", link)
        return link

    def _make_worker(self, roles: Roles, optimizer: Optimizer) -> Worker:
        method = self._method
        rate, updates_per_step = optimizer.rate, method.updates_per_step
        local_optimizer = sum_over_workers = None
        if method.pull_every > 1 and rate is not None:
            local_optimizer = sgd(lambda step: rate_at(rate, int(step * updates_per_step)))
        if method.is_lockstep:
            sum_over_workers = partial(sum_in_layer, self._workers, self.times, self._trace)
        return Worker(
            **self._worker_fields(roles),
            local_optimizer=local_optimizer,
            sum_over_workers=sum_over_workers,
        )

    def _worker_fields(self, roles: Roles) -> dict[str, Any]:
        """Return the fields that all workers have."""
        return {
            "row": self._row,
            "replica": self.replica,
            "times": self.times,
            "trace": self._trace,
            "check": self.check,
            "method": self._method,
            "push_link": self._links[0],
            "pull_link": self._links[1],
            "coordinator_rank": roles.servers[0],
            "server_slices": self._cut_parameters(roles),
        }

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
            push_link = self._world.threads.view_for("server push", push_link)
            pull_link = self._world.threads.view_for("server pull", pull_link)
            self._links += [push_link, pull_link]
        arena = self.replica.arena
        links = WorkerLinks(push_link, pull_link, roles.workers)
        shard = self._shard_class(
            arena,
            shard_ranges(arena.param.size, self.servers)[servers.rank],
            optimizer,
            links,
            gather_rows=partial(gather_rows, servers, arena),
            **self._method.shard_options,
        )
        return Server(shard, Coordinator(links), self._order_link, self.workers, self._trace)

    def _serve(self, events: EventSource, read_own_flags: Callable[[], Flags]) -> list[Event]:
        """Serve in the main thread; its time counts as compute or as waiting."""
        assert self._server is not None
        start, busy_s_before = perf_counter(), self._server.busy_s
        history = self._server.serve(events, read_own_flags)
        busy_s = self._server.busy_s - busy_s_before
        self.times.compute_s += busy_s
        self.times.wait_s += perf_counter() - start - busy_s
        return history

    def _join_flags(self, history: list[Event], flags: Flags) -> tuple[int, Flags]:
        """Return (step reached by the run, as the coordinator knows it, joint flags)."""
        step = 0
        if self._server and self._server.first:
            step = history[-1].replies[0].run_step
            flags = flags.merge(self._server.coordinator.flags)
        numbers = np.array([step, *flags], np.int64)
        recursive_doubling(self._world.voters, numbers, np.maximum)
        step, flags = int(numbers[0]), Flags(*numbers[1:].tolist())
        if flags.failed and not self._method.asynchronous:
            self.check.undo()  # no gradient of this step was applied
        if not self._method.is_lockstep:
            # All ranks get the staleness, and the mean of the running statistics of the workers.
            is_coordinator = self._server is not None and self._server.first
            local_staleness = self._method.staleness if is_coordinator else None
            self.staleness = broadcast_staleness(self._world.voters.link, local_staleness)
            buffer = self.replica.arena.buffer
            if self.worker is not None and buffer.size:
                recursive_doubling(self._workers, buffer, np.add)
                buffer /= self.workers
        return step, flags
