"""Asynchronous decentralised SGD: workers average in pairs, without any global barrier.

    worker i    g = dL/dx_i on a batch of its own;  meanwhile      x_i, x_j <- (x_i + x_j) / 2
                x_i <- x_i - update(g)

The graph is bipartite: *active* workers, which are those of even number, choose a *passive* one at
random in each step, which always answers, in a thread of its own. So no circle of workers can wait
for each other. An averaging is one event: neither x_i nor x_j changes in between, both get the same
bytes, and the sum of all x is kept. With 4 workers:

    active 0    [ gradient .... ][ update ]          0 ------ 1
                [ <-> 3 ]                             \\    /
    passive 3   [ gradient ........... ][ update ]     \\  /
                   [0]       [2]                       /  \\
                                                      2 ------ 3

Workers go at their own pace until all together have done their steps, which a desk on rank 0
counts: a few bytes to it and back while a gradient is computed. Who takes how many steps, and in
which order a passive worker has met others and taken gradients of its own, is logged: the rest
follows. Sent per step of an active worker: n bytes, and n by the one that answers; n being the
bytes of the parameters.

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
from hpctrain.engines.engine import Flags, Task, Work, join
from hpctrain.engines.gossip.base import GossipEngine
from hpctrain.engines.gossip.pairs import Active, Passive
from hpctrain.engines.parameter_server.coordinator import Answer, Desk, Event, Report
from hpctrain.engines.parameter_server.pacing import OwnPace
from hpctrain.engines.parameter_server.server import Serving
from hpctrain.engines.replay import Recorder
from hpctrain.engines.staleness import Staleness, shared_staleness
from hpctrain.gradients.replica import Replica
from hpctrain.nn import Sums
from hpctrain.optim import Optimizer
from hpctrain.world import World

DESK = 0  # the rank that counts steps


class AdPsgdEngine(GossipEngine):
    """See `hpctrain.engines.engine.Engine`."""

    asynchronous = True
    recorder: Recorder

    def __init__(self, world: World, replica: Replica, optimizer: Optimizer):
        """Take part as an active or a passive worker; collective."""
        super().__init__(world, replica, optimizer, "gossip, graph bipartite")
        link, self._push, self._pull = (world.link_for(name) for name in ("gossip", "push", "pull"))
        self._links = [link, self._push, self._pull]
        self.recorder, self._pace = Recorder(), OwnPace(self.workers)
        self._desk: Desk | None = None
        if self.worker == DESK:
            push = world.view_for("server push", self._push)
            pull = world.view_for("server pull", self._pull)
            self._desk = Desk(push, pull, range(self.workers))
            self._links += [push, pull]
        side = Passive if self.worker % 2 else Active
        self._side = side(world, self.times, replica.arena.param, link)

    def train(self, work: Work, start: int, until: int) -> tuple[int, Flags]:
        """Train from step `start` to `until`, at this worker's own pace."""
        self._take_up()
        serving = self._serving(start, until)
        try:
            reached, flags = self._work(work, start)
        except TransportError:
            if serving is not None:
                serving.join()  # raises the thread's error, if that was the cause
            raise
        history = serving.join() if serving is not None else []
        self._note(start, until, history)
        if isinstance(self._side, Passive):
            self._side.end()
        self.staleness = shared_staleness(
            self._group.link, self._pace.staleness if self._desk else None
        )
        reached, flags = join(self._group, reached, flags, bool(flags.failed))
        if flags.failed:
            self.settle()
        return reached, flags

    def state(self) -> list[Piece]:
        """Return this rank's pieces, and the steps that each worker has done."""
        clocks = self._pace.clocks
        return super().state() + ([Piece("clocks", 0, clocks.size, clocks)] if self._desk else [])

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take the whole state; the clocks of another number of workers mean nothing."""
        super().load(arrays)
        clocks = self._pace.clocks
        if "clocks" in arrays and arrays["clocks"].size == clocks.size:
            clocks[...] = arrays["clocks"]

    def close(self) -> None:
        """End the thread and free the links; collective."""
        self._side.close()
        super().close()

    def _work(self, work: Work, start: int) -> tuple[int, Flags]:
        """Take steps while the desk grants them; return the step of the run, and our flags.

        If this worker fails, the step returned is the one at which it failed.
        """
        flags, failed_at = work.flags(), start
        grant = self._report(start, 0, flags)()
        while grant.go:
            flags = flags.joined(work.flags())
            answer = self._report(grant.step, 1, flags)
            if flags.failed:
                grant = answer()
                continue
            failed_at, (sums, passes) = grant.step, self._step(work.task(grant.step))
            if not self.check.goes_on(passes, work.may_drop):
                flags = flags.failing(self.worker)
            grant = answer()
            if passes:
                work.done(grant.done, sums)
        self._side.leave()
        reached = self._report(grant.step, 0, flags)().done
        return (failed_at if flags.failed else reached), flags

    def _step(self, task: Task) -> tuple[Sums, bool]:
        """Average while a gradient is computed; apply the gradient if it is finite."""
        self._side.begin(task.key)
        sums, passes = self._gradient(task, task.scale)
        self._side.take(self._update if passes else None)
        return sums, passes

    def _report(self, step: int, steps: int, flags: Flags) -> Callable[[], Answer]:
        """Report to the desk that `steps` have begun; return a function to wait for the answer."""
        message = Report(0, 0, step, steps, 0, 0, flags).encoded()
        reply = np.zeros(len(Answer._fields), np.int64)
        requests = self._push.isend(message, DESK), self._pull.irecv(reply, DESK)

        def answer() -> Answer:
            with self._trace.span("wait for leave", "wait") as waiting:
                for request in requests:
                    request.wait()
            self.times.wait_s += waiting.seconds
            return Answer(*reply.tolist())

        return answer

    def _serving(self, start: int, until: int) -> Serving[Any] | None:
        """Start the thread of the desk or of a passive worker; it ends with the interval."""
        log = self.recorder.interval(start, until) if self._logs and self.recorder.repeats else {}
        if self._desk is not None:
            count = partial(self._count, self._desk, start, until, log)
            return Serving(count, self._world.fail)
        if isinstance(self._side, Passive):
            return Serving(self._side.answering(log.get("turns")), self._world.fail)
        return None

    def _count(self, desk: Desk, start: int, until: int, log: Mapping[str, Any]) -> list[Event]:
        """Grant steps to all workers until none are left; return the events."""
        events = self._replayed(desk, log) if log else self._pace.events(desk, start, until)
        history = []
        desk.open(Flags)  # this rank reports its flags as a worker
        for event in events:
            desk.tell(event.answers)
            if not event.order.over:
                desk.listen_again(event.answers)
            history.append(event)
        return history

    def _replayed(self, desk: Desk, log: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of the log, each after the report of its worker has arrived."""
        for event in map(Event.from_json, log["events"]):
            for worker in event.heard:
                desk.hear_from(worker)
            yield event
        self._pace.staleness = Staleness.from_json(log["staleness"])
        self._pace.clocks[:] = log["clocks"]

    @property
    def _logs(self) -> bool:
        """Whether this rank decides on an order, which it logs."""
        return self._desk is not None or isinstance(self._side, Passive)

    def _note(self, start: int, until: int, history: list[Any]) -> None:
        if self._desk is not None:
            clocks, staleness = self._pace.clocks.tolist(), self._pace.staleness.to_json()
            self.recorder.note(start, until, events=history, clocks=clocks, staleness=staleness)
        elif self._logs:
            self.recorder.note(start, until, turns=history)
