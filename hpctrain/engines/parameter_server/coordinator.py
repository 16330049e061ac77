"""The coordinator: the first server, which decides the order of all events.

A worker sends a *report*, followed by the slices of its gradient if it has one, and waits for the
*reply*: the next step, or the end. The coordinator turns each decision into an *event*, applies the
order of this event and forwards the order to the other servers. All servers therefore apply one
sequence of orders, and the list of events suffices to replay an asynchronous run (see replay.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hpctrain.engines.engine import Flags
from hpctrain.engines.parameter_server.shard import GradientAction, Order
from hpctrain.transport.link import Link, Request


@dataclass(frozen=True, kw_only=True)
class Report:
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
        return np.array(
            [
                self.step,
                self.steps,
                self.has_push,
                self.wants_pull,
                self.targets,
                self.batch_targets,
                *self.flags,
            ],
            np.int64,
        )

    @classmethod
    def decode(cls, numbers: np.ndarray) -> Report:
        """Return the report in the message `numbers`."""
        step, steps, has_push, wants_pull, targets, batch_targets, *flags = numbers.tolist()
        return cls(
            step=step,
            flags=Flags(*flags),
            steps=steps,
            has_push=bool(has_push),
            wants_pull=bool(wants_pull),
            targets=targets,
            batch_targets=batch_targets,
        )


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


class Coordinator:
    """The coordinator's messages: reports arrive by `push_link`, replies leave by `pull_link`."""

    def __init__(self, push_link: Link, pull_link: Link, worker_ranks: Sequence[int]):
        """Exchange messages with the workers at `worker_ranks`."""
        self.flags = Flags()  #: the maximum of all flags reported since `begin_interval`
        self._read_own_flags: Callable[[], Flags] = Flags
        self._push_link, self._pull_link = push_link, pull_link
        self._worker_ranks = worker_ranks
        self._inbox = np.zeros((len(worker_ranks), REPORT_LENGTH), np.int64)
        self._posted_receives: dict[int, Request] = {}
        self._sent_replies: dict[int, tuple[Request, np.ndarray]] = {}

    @property
    def workers(self) -> int:
        return len(self._worker_ranks)

    def begin_interval(self, read_own_flags: Callable[[], Flags]) -> None:
        """Begin an interval: expect a report of each worker.

        `read_own_flags()` returns the flags of this rank.
        """
        self.flags, self._read_own_flags = Flags(), read_own_flags
        self._post_receives(range(self.workers))

    def receive_report(self) -> tuple[int, Report]:
        """Wait for any report; return (worker, report)."""
        index = self._push_link.wait_any(list(self._posted_receives.values()))
        worker = list(self._posted_receives)[index]
        return worker, self._decode_report(worker)

    def receive_report_from(self, worker: int) -> Report:
        """Wait for the report of `worker`; return it."""
        self._posted_receives[worker].wait()
        return self._decode_report(worker)

    def send_replies(self, replies: Sequence[Reply]) -> None:
        """Send `replies` to their workers."""
        for reply in replies:
            if reply.worker in self._sent_replies:  # its worker has reported again: returns at once
                self._sent_replies[reply.worker][0].wait()
            message = np.array(reply, np.int64)
            request = self._pull_link.isend(message, self._worker_ranks[reply.worker])
            self._sent_replies[reply.worker] = request, message

    def expect_reports(self, replies: Sequence[Reply]) -> None:
        """Post a receive for the next report of each worker in `replies`.

        Receive their gradients first: one link carries gradients and reports in order.
        """
        self._post_receives(reply.worker for reply in replies)

    def _post_receives(self, workers: Iterable[int]) -> None:
        for worker in workers:
            self._posted_receives[worker] = self._push_link.irecv(
                self._inbox[worker], self._worker_ranks[worker]
            )

    def _decode_report(self, worker: int) -> Report:
        # `_post_receives` appends the worker's next request, so that no worker starves.
        del self._posted_receives[worker]
        report = Report.decode(self._inbox[worker])
        self.flags = self.flags.merge(report.flags).merge(self._read_own_flags())
        return report
