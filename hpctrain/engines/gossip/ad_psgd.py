"""Asynchronous decentralised SGD: workers average in pairs, without any global barrier.

    worker i    g = dL/dx_i on a batch of its own;  meanwhile      x_i, x_j <- (x_i + x_j) / 2
                x_i <- x_i - update(g)

The graph is bipartite: *active* workers, which have even numbers, choose a *passive* one at random
in each step. A thread of the passive worker serves them, so that no cycle of workers can deadlock.
An averaging is atomic: neither x_i nor x_j changes meanwhile, both workers receive the same bytes,
and the sum of x over the workers is invariant. With 4 workers:

    active 0    [ gradient .... ][ update ]          0 ------ 1
                [ <-> 3 ]                             \\    /
    passive 3   [ gradient ........... ][ update ]     \\  /
                   [0]       [2]                       /  \\
                                                      2 ------ 3

Workers go at their own pace until all together have done the steps of the run. A coordinator on
rank 0 counts the steps; it exchanges a few bytes with each worker while a gradient is computed. The
log holds the number of steps of each worker and the order in which a passive worker averages and
applies its own gradients; these facts determine the whole run. Sent per step: n bytes by the active
worker, n by the passive one; n is the size of the parameters in bytes.

Source: Lian, Zhang, Zhang and Liu, "Asynchronous decentralized parallel stochastic gradient
descent", 2018.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.engines.engine import Flags, Task, Work
from hpctrain.engines.gossip.base import GossipEngine
from hpctrain.engines.gossip.pairs import ActiveWorker, PassiveWorker
from hpctrain.engines.parameter_server.coordinator import Coordinator, PeriodicMethod, Reply, Report
from hpctrain.engines.parameter_server.roles import WorkerLinks
from hpctrain.engines.parameter_server.server import Outcome, server_thread
from hpctrain.engines.replay import Recorder
from hpctrain.engines.saved_state import SavedState
from hpctrain.engines.staleness import broadcast_staleness
from hpctrain.gradients.replica import Replica
from hpctrain.nn import Sums
from hpctrain.optim import Optimizer
from hpctrain.transport.link import Link, Request, wait_all
from hpctrain.world import World

COORDINATOR_RANK = 0  # the rank that counts steps


class AdPsgdEngine(GossipEngine):
    """See `hpctrain.engines.engine.Engine`."""

    asynchronous = True
    recorder: Recorder

    def __init__(self, world: World, replica: Replica, optimizer: Optimizer):
        """Take part as an active or a passive worker; collective."""
        super().__init__(world, replica, optimizer, "gossip, graph bipartite")
        link = world.threads.link_for("gossip")
        self._push_link, self._pull_link = (
            world.threads.link_for("push"),
            world.threads.link_for("pull"),
        )
        self._links = [link, self._push_link, self._pull_link]
        self.recorder, self._method = Recorder(), PeriodicMethod(self.workers)
        self._coordinator: Coordinator | None = None
        if self.worker == COORDINATOR_RANK and self._row.is_first:
            push_link = world.threads.view_for("server push", self._push_link)
            pull_link = world.threads.view_for("server pull", self._pull_link)
            self._coordinator = Coordinator(WorkerLinks(push_link, pull_link, range(self.workers)))
            self._links += [push_link, pull_link]
        self._role = self._make_role(link)

    def _make_role(self, link: Link) -> ActiveWorker | PassiveWorker:
        """Return the active or the passive side of this worker; collective over its row."""
        world, times, param = self._world, self.times, self.replica.arena.param
        if self.worker % 2 == 0:
            return ActiveWorker(world, times, param, link)
        row_link = None
        if world.grid is not None:
            pipe = world.grid.pipe.link
            (row_link,) = world.threads.register("turns", pipe.split(0, pipe.rank))
            self._links.append(row_link)
        return PassiveWorker(world, times, param, link, row_link)

    def train(self, work: Work, start: int, until: int) -> tuple[int, Flags]:
        """Train from step `start` to `until`, at this worker's own pace."""
        self._train_apart()
        with self._serve(start, until) as history:
            reached_step, flags = self._run_steps(work, start)
        if self._coordinator is not None:
            self._method.record_interval(self.recorder, start, until, history.result())
        self._role.end_interval(self.recorder, start, until, history.result)
        self.staleness = broadcast_staleness(
            self._world.voters.link, self._method.staleness if self._coordinator else None
        )
        reached_step, flags = self._join_flags(reached_step, flags, bool(flags.failed))
        if flags.failed:
            self.settle()
        return reached_step, flags

    def state(self) -> list[Piece]:
        """Return this rank's pieces, and the steps that each worker has done."""
        return super().state() + (self._method.pieces() if self._coordinator else [])

    def load(self, saved: SavedState) -> None:
        """Request the whole state."""
        super().load(saved)
        self._method.load(saved)

    def close(self) -> None:
        """End the thread and free the links; collective."""
        self._role.close()
        super().close()

    def _run_steps(self, work: Work, start: int) -> tuple[int, Flags]:
        """Run steps while the coordinator grants them; return (step of the run, flags).

        A worker that fails returns the step at which it failed.
        """
        flags, failed_step = self._row.join(work.flags()), start
        reply = self._send_report(start, 0, flags)()
        while reply.grant:
            flags = self._row.join(flags.merge(work.flags()))
            wait_for_reply = self._send_report(reply.step, 1, flags)
            if flags.failed:
                reply = wait_for_reply()
                continue
            failed_step, (sums, is_finite) = reply.step, self._train_step(work.task(reply.step))
            if not self.check.may_continue(is_finite, work.max_drops):
                flags = flags.with_failure(self.worker)
            reply = wait_for_reply()
            if is_finite:
                work.record(reply.run_step, sums)
        self._role.finish_averaging()
        reached_step = self._send_report(reply.step, 0, flags)().run_step
        return (failed_step if flags.failed else reached_step), flags

    def _train_step(self, task: Task) -> tuple[Sums, bool]:
        """Compute a gradient during the averaging; apply it if it is finite."""
        self._role.start_averaging(task.key)
        sums, is_finite = self._compute_gradient(task)
        self._role.apply_gradient(self._apply_gradient if is_finite else None)
        return sums, is_finite

    def _send_report(self, step: int, steps: int, flags: Flags) -> Callable[[], Reply]:
        """Report that `steps` have begun; return a function that waits for the reply."""
        message = Report(step=step, steps=steps, flags=flags).encode()
        reply = np.zeros(len(Reply._fields), np.int64)
        requests: list[Request] = []
        if self._row.is_first:
            requests.append(self._push_link.isend(message, COORDINATOR_RANK))
            requests.append(self._pull_link.irecv(reply, COORDINATOR_RANK))

        def wait_for_reply() -> Reply:
            with self.times.wait(self._trace, "wait for grant"):
                wait_all(requests)
                self._row.share(reply)
            return Reply(*reply.tolist())

        return wait_for_reply

    def _serve(self, start: int, until: int) -> AbstractContextManager[Outcome[list[Any]]]:
        """Return the thread of the coordinator or of a passive worker, with the entries to log."""
        serve: Callable[[], list[Any]] | None
        if self._coordinator is not None:
            events = self._method.interval_events(self._coordinator, self.recorder, start, until)
            serve = partial(self._coordinator.run, events, apply=lambda event: None)
        else:
            serve = self._role.server_body(self.recorder, start, until)
        return nullcontext(Outcome()) if serve is None else server_thread(serve, self._world)
