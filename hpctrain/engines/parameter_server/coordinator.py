"""The coordinator: the first server, which decides the order of all events.

A worker sends a *report*, followed by the slices of its gradient if it has one, and waits for the
*reply*: the next step, or the end. The coordinator turns each decision into an *event*, applies it
and forwards its order to the other servers, which apply it too. All servers therefore apply one
sequence, and the list of events suffices to replay an asynchronous run (see replay.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hpctrain.engines.engine import Flags
from hpctrain.engines.parameter_server.shard import Order, Use
from hpctrain.transport.link import Link, Request


@dataclass(frozen=True, kw_only=True)
class Report:
    """The message of a worker to the coordinator."""

    step: int  #: the first step since the last report
    flags: Flags
    steps: int = 0  #: steps of the worker since its last report
    push: bool = False  #: the slices of a gradient, or of parameters, follow
    pull: bool = False  #: if the worker goes on, it first receives the parameters
    targets: int = 0  #: samples, or tokens of texts, over which the gradient is the sum
    batch_targets: int = 0  #: those of the whole batch

    def encode(self) -> np.ndarray:
        """Return the report as REPORT_LENGTH numbers, int64, to be sent."""
        counts = (self.step, self.steps, self.push, self.pull, self.targets, self.batch_targets)
        return np.array([*counts, *self.flags], np.int64)

    @classmethod
    def decode(cls, numbers: np.ndarray) -> Report:
        """Return the report that was sent as `numbers`."""
        step, steps, push, pull, targets, batch_targets, *flags = numbers.tolist()
        return cls(
            step=step,
            flags=Flags(*flags),
            steps=steps,
            push=bool(push),
            pull=bool(pull),
            targets=targets,
            batch_targets=batch_targets,
        )


REPORT_LENGTH = len(Report(step=0, flags=Flags()).encode())


class Reply(NamedTuple):
    """The reply to a worker."""

    worker: int
    grant: int  #: 0: stop; 1: go on; at its own pace: steps before the next report
    step: int  #: the next step of the worker
    run_step: int  #: the step that the run has reached


class Event(NamedTuple):
    """One decision: after the reports of `reporters`, servers apply `order`, send `replies`."""

    reporters: tuple[int, ...]
    order: Order
    replies: tuple[Reply, ...] = ()
    staleness: int | None = None  #: of the gradient, where it may be stale

    @classmethod
    def from_json(cls, entry: Sequence[Any]) -> Event:
        """Return the event of an entry of the log, nested lists from JSON."""
        reporters, (pushed, use, factor, pull, last), replies, *staleness = entry
        order = Order(tuple(pushed), Use(use), factor, tuple(pull), last)
        return cls(tuple(reporters), order, tuple(Reply(*reply) for reply in replies), *staleness)


def final_event(workers: int, step: int) -> Event:
    """Return the event that ends an interval at `step`: all workers receive the parameters."""
    ranks = tuple(range(workers))
    order = Order(pull=ranks, last=True)
    return Event((), order, tuple(Reply(w, 0, step, step) for w in ranks))


class Coordinator:
    """The coordinator's messages: reports arrive by `push`, replies leave by `pull`."""

    def __init__(self, push: Link, pull: Link, workers: Sequence[int]):
        """Exchange messages with `workers`, given as ranks."""
        self.flags = Flags()  #: all flags reported since `open`, merged
        self._own_flags: Callable[[], Flags] = Flags
        self._push, self._pull, self._ranks = push, pull, workers
        self._inbox = np.zeros((len(workers), REPORT_LENGTH), np.int64)
        self._posted: dict[int, Request] = {}
        self._sent: dict[int, tuple[Request, np.ndarray]] = {}

    @property
    def workers(self) -> int:
        return len(self._ranks)

    def open(self, own_flags: Callable[[], Flags]) -> None:
        """Begin an interval: every worker reports; `own_flags()` returns the flags of this rank."""
        self.flags, self._own_flags = Flags(), own_flags
        self._post_receives(range(self.workers))

    def receive_report(self) -> tuple[int, Report]:
        """Return the next report to arrive, as (worker, report)."""
        posted_receives = list(self._posted.items())
        index = self._push.wait_any([request for _, request in posted_receives])
        return posted_receives[index][0], self._read(posted_receives[index][0])

    def receive_report_from(self, worker: int) -> Report:
        """Wait for the report of `worker`; return it."""
        self._posted[worker].wait()
        return self._read(worker)

    def send_replies(self, replies: Sequence[Reply]) -> None:
        """Send `replies` to their workers."""
        for reply in replies:
            if reply.worker in self._sent:  # the worker has reported since: no wait
                self._sent[reply.worker][0].wait()
            x = np.array(reply, np.int64)
            self._sent[reply.worker] = self._pull.isend(x, self._ranks[reply.worker]), x

    def expect_reports(self, replies: Sequence[Reply]) -> None:
        """Post a receive for the next report of each worker in `replies`.

        Call it only after their gradients have been received: one link carries both, in order.
        """
        self._post_receives(reply.worker for reply in replies)

    def _post_receives(self, workers: Iterable[int]) -> None:
        for w in workers:
            self._posted[w] = self._push.irecv(self._inbox[w], self._ranks[w])

    def _read(self, worker: int) -> Report:
        # The worker's next request goes to the end of the list, so that none starves.
        del self._posted[worker]
        report = Report.decode(self._inbox[worker])
        self.flags = self.flags.merged(report.flags).merged(self._own_flags())
        return report
