"""The coordinator: the first server, which decides the order of events.

A worker sends a *report*, followed by the slices of its gradient if it has one, and waits for the
*reply*: the next step, or the end. The coordinator turns each decision into an *event*, applies the
order of this event and forwards the order to the other servers. All servers therefore apply one
sequence of orders, and the list of events suffices to replay an asynchronous run (see replay.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.engines.engine import Flags
from hpctrain.engines.parameter_server.roles import WorkerLinks
from hpctrain.engines.parameter_server.shard import GradientAction, Order
from hpctrain.engines.replay import Interval, Recorder
from hpctrain.engines.saved_state import SavedState
from hpctrain.engines.staleness import Staleness
from hpctrain.transport.link import Request


class Report(NamedTuple):
    """The message of a worker to the coordinator."""

    step: int  #: the first step since the last report
    flags: Flags
    steps: int = 0  #: steps of the worker since its last report
    has_push: bool = False  #: the slices of a gradient, or of parameters, follow
    wants_pull: bool = False  #: the worker waits for the parameters before its next step
    targets: int = 0  #: samples, or tokens of texts, over which the gradient is the sum
    batch_targets: int = 0  #: samples or tokens of the whole batch

    def encode(self) -> np.ndarray:
        """Return the report as a message of REPORT_LENGTH int64 numbers."""
        step, flags, *others = self
        return np.array([step, *flags, *others], np.int64)

    @classmethod
    def decode(cls, numbers: np.ndarray) -> Report:
        """Return the report in the message `numbers`."""
        step, stop, failed, *others = numbers.tolist()
        return cls(step, Flags(stop, failed), *others)


REPORT_LENGTH = len(Report(step=0, flags=Flags()).encode())


class Reply(NamedTuple):
    """The reply to a worker."""

    worker: int
    grant: int  #: the steps until the next report; 0: stop. With a push per report: 1 or 0
    step: int  #: the next step of the worker
    run_step: int  #: the step that the run has reached


class Event(NamedTuple):
    """One decision: after the reports of `reporters` the servers apply `order`, send `replies`."""

    reporters: tuple[int, ...]
    order: Order
    replies: tuple[Reply, ...] = ()
    staleness: int | None = None  #: the staleness of the gradient; None if it cannot be stale

    @classmethod
    def from_json(cls, entry: Sequence[Any]) -> Event:
        """Return the event from its log entry: nested lists from JSON."""
        reporters, (pushing, action, factor, pulling, is_last), replies, *staleness = entry
        order = Order(tuple(pushing), GradientAction(action), factor, tuple(pulling), is_last)
        return cls(tuple(reporters), order, tuple(Reply(*reply) for reply in replies), *staleness)


def final_event(workers: int, step: int) -> Event:
    """Return the event that ends an interval at `step`: all workers receive the parameters."""
    order = Order(pulling_workers=tuple(range(workers)), is_last=True)
    return Event((), order, tuple(Reply(worker, 0, step, step) for worker in range(workers)))


class ServerMethod:
    """The base class of rules by which gradients make updates and workers continue."""

    asynchronous = True
    is_lockstep = False  #: every worker takes part in every step
    push_every = pull_every = 1
    updates_per_step = 1.0
    #: what a shard does beside updates: its arguments `delay_compensation` and `accumulates`
    shard_options: Mapping[str, Any] = {}

    def __init__(self, workers: int, has_clocks: bool = True):
        self.workers, self.staleness = workers, Staleness()
        #: the steps that each worker has done; empty if all do the same
        self.clocks = np.zeros(workers if has_clocks else 0, np.int64)

    def events(self, coordinator: Coordinator, start: int, until: int) -> Iterator[Event]:
        """Yield the events from step `start` to `until`, the last with `Order.is_last`."""
        raise NotImplementedError

    def _replay_events(self, coordinator: Coordinator, interval: Interval) -> Iterator[Event]:
        """Yield the events of a log, each after the reports of its workers have arrived."""
        for event in map(Event.from_json, interval["events"]):
            failed = coordinator.flags.failed
            for worker in event.reporters:
                coordinator.receive_report_from(worker)
            if event.order.action == GradientAction.LATE:
                coordinator.flags = coordinator.flags._replace(failed=failed)
            yield event
        self.staleness = Staleness.from_json(interval["staleness"])
        self.clocks[:] = interval["clocks"]

    def interval_events(
        self, coordinator: Coordinator, recorder: Recorder | None, start: int, until: int
    ) -> Iterator[Event]:
        """Return the events of an interval, as the rule decides or as the log has them."""
        if recorder is not None and recorder.is_replay:
            return self._replay_events(coordinator, recorder.next_interval(start, until))
        return self.events(coordinator, start, until)

    def record_interval(
        self, recorder: Recorder, start: int, until: int, history: list[Event]
    ) -> None:
        """Record the events of an interval, for a replay."""
        recorder.record_interval(
            start,
            until,
            events=history,
            clocks=self.clocks.tolist(),
            staleness=self.staleness.to_json(),
        )

    def pieces(self) -> list[Piece]:
        """Return the state, which the first server saves."""
        clocks = self.clocks
        return [Piece("clocks", 0, clocks.size, clocks)] if clocks.size else []

    def load(self, saved: SavedState) -> None:
        """Request the state; clocks of another number of workers are ignored."""
        if saved.sizes.get("clocks") == self.clocks.size:
            saved.request_deferred("clocks", self.clocks)

    def run_step(self) -> int:
        """Return the step that all workers together have reached."""
        return int(self.clocks.sum()) // self.workers


class Coordinator:
    """The coordinator's messages: reports of workers, and replies."""

    def __init__(self, links: WorkerLinks):
        """Exchange messages by `links`."""
        self.flags = Flags()  #: the maximum of all flags reported in this interval
        self._read_own_flags: Callable[[], Flags] = Flags
        self._links = links
        self._inbox = np.zeros((len(links.ranks), REPORT_LENGTH), np.int64)
        self._posted_receives: dict[int, Request] = {}
        self._sent_replies: dict[int, tuple[Request, np.ndarray]] = {}

    def run(
        self,
        events: Iterable[Event],
        apply: Callable[[Event], None],
        read_own_flags: Callable[[], Flags] = Flags,
    ) -> list[Event]:
        """Carry out the `events` of an interval, to which each worker reports; return them.

        `apply(event)` applies its order; `read_own_flags()` returns the flags of this rank.
        """
        self.flags, self._read_own_flags = Flags(), read_own_flags
        history = []
        try:
            self._post_receives(range(len(self._links.ranks)))
            for event in events:
                for reply in event.replies:
                    if reply.worker in self._sent_replies:  # it has reported again: returns at once
                        self._sent_replies[reply.worker][0].wait()
                    message = np.array(reply, np.int64)
                    request = self._links.pull.isend(message, self._links.ranks[reply.worker])
                    self._sent_replies[reply.worker] = request, message
                apply(event)
                # One link carries gradients and reports in order: the gradients have been received.
                if not event.order.is_last:
                    self._post_receives(reply.worker for reply in event.replies)
                history.append(event)
            return history
        finally:
            self._read_own_flags = Flags  # whose owner has this engine: a lost one is free at once

    def receive_report(self) -> tuple[int, Report]:
        """Wait for any report; return (worker, report)."""
        index = self._links.push.wait_any(list(self._posted_receives.values()))
        worker = list(self._posted_receives)[index]
        return worker, self._decode_report(worker)

    def receive_report_from(self, worker: int) -> Report:
        """Wait for the report of `worker`; return it."""
        self._posted_receives[worker].wait()
        return self._decode_report(worker)

    def _post_receives(self, workers: Iterable[int]) -> None:
        for worker in workers:
            self._posted_receives[worker] = self._links.push.irecv(
                self._inbox[worker], self._links.ranks[worker]
            )

    def _decode_report(self, worker: int) -> Report:
        # `_post_receives` appends the worker's next request, so that no worker starves.
        del self._posted_receives[worker]
        report = Report.decode(self._inbox[worker])
        self.flags = self.flags.merge(report.flags).merge(self._read_own_flags())
        return report


class PeriodicMethod(ServerMethod):
    """Grants each worker `period` steps at a time.

    A worker reports, receives a grant of steps, and reports again when it begins the last granted
    step, so that the reply arrives while it computes. After a grant of zero steps a worker finishes
    its step and reports once more. The order of reports decides how many steps each worker takes,
    and is logged.
    """

    def __init__(self, workers: int, period: int = 1, moving_rate: float = 0.0):
        """Grant steps up to the next exchange, which is due every `period` steps of a worker.

        In an exchange the servers move by `moving_rate` times the difference to the worker.
        """
        super().__init__(workers)
        self.period, self.moving_rate = period, moving_rate

    def events(self, coordinator: Coordinator, start: int, until: int) -> Iterator[Event]:
        """Yield the events until all workers together have reached step `until`."""
        if self.run_step() != start:
            self.clocks[:] = start  # the clocks are of another run or of other workers
        steps_left = until * self.workers - int(self.clocks.sum())
        stopping_workers: set[int] = set()
        finished_workers = 0
        while finished_workers < self.workers:
            worker, report = coordinator.receive_report()
            if worker in stopping_workers:  # its last report, after its last step
                finished_workers += 1
                yield Event((worker,), Order())
                continue
            steps = self._grant_steps(worker, report, steps_left, coordinator)
            steps_left -= steps
            if not steps:
                stopping_workers.add(worker)
            pushing_workers = (worker,) if report.has_push else ()
            action = GradientAction.ELASTIC if pushing_workers else GradientAction.NONE
            reply = Reply(worker, steps, int(self.clocks[worker]), self.run_step())
            yield Event((worker,), Order(pushing_workers, action, self.moving_rate), (reply,))
        yield final_event(self.workers, self.run_step())

    def _grant_steps(
        self, worker: int, report: Report, steps_left: int, coordinator: Coordinator
    ) -> int:
        """Return the number of steps that `worker` may take before it reports again."""
        self.clocks[worker] += report.steps
        clock = int(self.clocks[worker])
        if any(coordinator.flags):
            return 0
        steps = min(self.period - clock % self.period, steps_left)
        if steps:
            self.staleness.record_gap(clock - int(self.clocks.min()))
        return steps
