"""Asynchronous decentralised SGD: workers average in pairs, without any global barrier.

    worker i    g = dL/dx_i on a batch of its own;  meanwhile      x_i, x_j <- (x_i + x_j) / 2
                x_i <- x_i - update(g)

The graph is bipartite: *active* workers, those of even number, choose a *passive* one at random in
each step. A thread of the passive worker serves them, so that no cycle of workers can deadlock. An
averaging is atomic: neither x_i nor x_j changes in between, both receive the same bytes, and the
sum of all x is invariant. With 4 workers:

    active 0    [ gradient .... ][ update ]          0 ------ 1
                [ <-> 3 ]                             \\    /
    passive 3   [ gradient ........... ][ update ]     \\  /
                   [0]       [2]                       /  \\
                                                      2 ------ 3

Workers go at their own pace until all together have done the steps of the run, which a coordinator
on rank 0 counts: a few bytes to it and back while a gradient is computed. The log holds how many
steps each worker takes, and in which order a passive worker averages and applies its own gradients:
these determine the rest. Sent per step: n bytes by the active worker, n by the passive one; n being
the size of the parameters in bytes.

Source: Lian, Zhang, Zhang and Liu, "Asynchronous decentralized parallel stochastic gradient
descent", 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.core.errors import TransportError
from hpctrain.engines.engine import Flags, Task, Work, join_flags
from hpctrain.engines.gossip.base import GossipEngine
from hpctrain.engines.gossip.pairs import ActiveWorker, PassiveWorker
from hpctrain.engines.parameter_server.coordinator import Coordinator, Event, Reply, Report
from hpctrain.engines.parameter_server.pacing import PeriodicMethod
from hpctrain.engines.parameter_server.server import ServerThread
from hpctrain.engines.replay import Recorder
from hpctrain.engines.saved_state import SavedState
from hpctrain.engines.staleness import Staleness, shared_staleness
from hpctrain.gradients.replica import Replica
from hpctrain.nn import Sums
from hpctrain.optim import Optimizer
from hpctrain.world import World

COORDINATOR = 0  # the rank that counts steps


class AdPsgdEngine(GossipEngine):
    """See `hpctrain.engines.engine.Engine`."""

    asynchronous = True
    recorder: Recorder

    def __init__(self, world: World, replica: Replica, optimizer: Optimizer):
        """Take part as an active or a passive worker; collective."""
        super().__init__(world, replica, optimizer, "gossip, graph bipartite")
        link, self._push, self._pull = (world.link_for(name) for name in ("gossip", "push", "pull"))
        self._links = [link, self._push, self._pull]
        self.recorder, self._method = Recorder(), PeriodicMethod(self.workers)
        self._coordinator: Coordinator | None = None
        if self.worker == COORDINATOR:
            push = world.view_for("server push", self._push)
            pull = world.view_for("server pull", self._pull)
            self._coordinator = Coordinator(push, pull, range(self.workers))
            self._links += [push, pull]
        kind = PassiveWorker if self.worker % 2 else ActiveWorker
        self._role = kind(world, self.times, replica.arena.param, link)

    def train(self, work: Work, start: int, until: int) -> tuple[int, Flags]:
        """Train from step `start` to `until`, at this worker's own pace."""
        self._restore_planes()
        thread = self._start_thread(start, until)
        try:
            reached, flags = self._work(work, start)
        except TransportError:
            if thread is not None:
                thread.join()  # raises the thread's error, if that was the cause
            raise
        history = thread.join() if thread is not None else []
        self._note(start, until, history)
        if isinstance(self._role, PassiveWorker):
            self._role.end()
        self.staleness = shared_staleness(
            self._group.link, self._method.staleness if self._coordinator else None
        )
        reached, flags = join_flags(self._group, reached, flags, bool(flags.failed))
        if flags.failed:
            self.settle()
        return reached, flags

    def state(self) -> list[Piece]:
        """Return this rank's pieces, and the steps that each worker has done."""
        clocks = self._method.clocks
        return super().state() + (
            [Piece("clocks", 0, clocks.size, clocks)] if self._coordinator else []
        )

    def load(self, saved: SavedState) -> None:
        """Request the whole state; clocks of another number of workers are ignored."""
        super().load(saved)
        clocks = self._method.clocks
        if saved.sizes.get("clocks") == clocks.size:
            saved.request_aside("clocks", clocks)

    def close(self) -> None:
        """End the thread and free the links; collective."""
        self._role.close()
        super().close()

    def _work(self, work: Work, start: int) -> tuple[int, Flags]:
        """Run steps while the coordinator grants them; return the step of the run, and our flags.

        If this worker fails, the step returned is the one at which it failed.
        """
        flags, failed_at = work.flags(), start
        reply = self._report(start, 0, flags)()
        while reply.grant:
            flags = flags.merged(work.flags())
            wait_for_reply = self._report(reply.step, 1, flags)
            if flags.failed:
                reply = wait_for_reply()
                continue
            failed_at, (sums, passes) = reply.step, self._step(work.task(reply.step))
            if not self.check.may_continue(passes, work.max_drops):
                flags = flags.with_failure(self.worker)
            reply = wait_for_reply()
            if passes:
                work.record(reply.run_step, sums)
        self._role.finish()
        reached = self._report(reply.step, 0, flags)().run_step
        return (failed_at if flags.failed else reached), flags

    def _step(self, task: Task) -> tuple[Sums, bool]:
        """Average while a gradient is computed; apply the gradient if it is finite."""
        self._role.begin(task.key)
        sums, passes = self._gradient(task, task.scale)
        self._role.apply(self._update if passes else None)
        return sums, passes

    def _report(self, step: int, steps: int, flags: Flags) -> Callable[[], Reply]:
        """Report to the coordinator that `steps` have begun; return the wait for its reply."""
        message = Report(step=step, steps=steps, flags=flags).encode()
        reply = np.zeros(len(Reply._fields), np.int64)
        requests = self._push.isend(message, COORDINATOR), self._pull.irecv(reply, COORDINATOR)

        def wait_for_reply() -> Reply:
            with self._trace.span("wait for grant", "wait") as waiting:
                for request in requests:
                    request.wait()
            self.times.wait_s += waiting.seconds
            return Reply(*reply.tolist())

        return wait_for_reply

    def _start_thread(self, start: int, until: int) -> ServerThread[Any] | None:
        """Start the thread of the coordinator or of a passive worker; it ends with the interval."""
        log = (
            self.recorder.interval(start, until)
            if self._keeps_log and self.recorder.replays
            else {}
        )
        if self._coordinator is not None:
            count = partial(self._count, self._coordinator, start, until, log)
            return ServerThread(count, self._world.fail)
        if isinstance(self._role, PassiveWorker):
            return ServerThread(self._role.server(log.get("turns")), self._world.fail)
        return None

    def _count(
        self, coordinator: Coordinator, start: int, until: int, log: Mapping[str, Any]
    ) -> list[Event]:
        """Grant steps to all workers until none are left; return the events."""
        events = (
            self._replayed(coordinator, log)
            if log
            else self._method.events(coordinator, start, until)
        )
        history = []
        coordinator.open(Flags)  # this rank reports its flags as a worker
        for event in events:
            coordinator.send_replies(event.replies)
            if not event.order.last:
                coordinator.expect_reports(event.replies)
            history.append(event)
        return history

    def _replayed(self, coordinator: Coordinator, log: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of the log, each after the report of its worker has arrived."""
        for event in map(Event.from_json, log["events"]):
            for worker in event.reporters:
                coordinator.receive_report_from(worker)
            yield event
        self._method.staleness = Staleness.from_json(log["staleness"])
        self._method.clocks[:] = log["clocks"]

    @property
    def _keeps_log(self) -> bool:
        """Whether this rank decides on an order, which it logs."""
        return self._coordinator is not None or isinstance(self._role, PassiveWorker)

    def _note(self, start: int, until: int, history: list[Any]) -> None:
        if self._coordinator is not None:
            clocks, staleness = self._method.clocks.tolist(), self._method.staleness.to_json()
            self.recorder.note(start, until, events=history, clocks=clocks, staleness=staleness)
        elif self._keeps_log:
            self.recorder.note(start, until, turns=history)
