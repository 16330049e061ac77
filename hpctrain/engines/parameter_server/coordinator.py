"""The desk: workers report to the first server, which decides the order of all events.

A worker sends a *report*, the slices of its gradient behind it if it has one, and waits for the
*answer*: go on with which step, or stop. The first server makes an *event* of each decision,
applies it and sends it to the other servers, which apply it too. So all servers see one sequence,
and a list of events suffices to replay an asynchronous run (see replay.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpctrain.engines.engine import Flags
from hpctrain.engines.parameter_server.shard import Order, Use
from hpctrain.transport.link import Link, Request


class Report(NamedTuple):
    """The message of a worker to the desk; `gradient` and `wants` are 0 or 1."""

    gradient: int  #: the slices of a gradient, or of parameters, follow
    wants: int  #: the parameters shall come with the grant to go on
    step: int  #: that the gradient is of
    steps: int  #: how many the worker has done since its last report
    targets: int  #: samples, or places in texts, that the gradient is the sum over
    of_targets: int  #: of so many in the whole batch
    flags: Flags

    def encoded(self) -> np.ndarray:
        """Return the report as int64 numbers, to be sent."""
        return np.array([*self[:-1], *self.flags], np.int64)

    @classmethod
    def decoded(cls, numbers: np.ndarray) -> Report:
        """Return the report whose `encoded` numbers these are."""
        gradient, wants, step, steps, targets, of_targets, *flags = numbers.tolist()
        return cls(gradient, wants, step, steps, targets, of_targets, Flags(*flags))


class Answer(NamedTuple):
    """The reply to a worker: `step` to go on with if `go`; the run has come to step `done`."""

    worker: int
    go: int  #: 0 for no further; at its own pace, how many steps before the next report
    step: int
    done: int


class Event(NamedTuple):
    """One decision: after `heard` have reported, servers apply `order` and `answers` are sent."""

    heard: tuple[int, ...]
    order: Order
    answers: tuple[Answer, ...] = ()
    staleness: int | None = None  #: of the gradient that comes, where it may be stale

    @classmethod
    def from_json(cls, entry: Sequence[Any]) -> Event:
        """Return the event of an entry of the log, nested lists from JSON."""
        heard, (pushed, use, factor, pull, over), answers, *staleness = entry
        order = Order(tuple(pushed), Use(use), factor, tuple(pull), over)
        return cls(tuple(heard), order, tuple(Answer(*answer) for answer in answers), *staleness)


def over(workers: int, step: int) -> Event:
    """Return the event that ends an interval: all workers get the parameters as they are now."""
    everyone = tuple(range(workers))
    order = Order((), Use.NONE, 1.0, everyone, True)
    return Event((), order, tuple(Answer(w, 0, step, step) for w in everyone))


class Desk:
    """The first server's side: reports come by `push`, answers go by `pull`."""

    def __init__(self, push: Link, pull: Link, workers: Sequence[int]):
        """Serve `workers`, given as ranks."""
        self.flags = Flags()  #: all flags reported since `open`, joined
        self._own_flags: Callable[[], Flags] = Flags
        self._push, self._pull, self._ranks = push, pull, workers
        numbers = len(Report._fields) - 1 + len(Flags._fields)
        self._inbox = np.zeros((len(workers), numbers), np.int64)
        self._posted: dict[int, Request] = {}
        self._sent: dict[int, tuple[Request, np.ndarray]] = {}

    @property
    def workers(self) -> int:
        return len(self._ranks)

    def open(self, own_flags: Callable[[], Flags]) -> None:
        """Begin an interval: every worker reports; `own_flags()` returns the flags of this rank."""
        self.flags, self._own_flags = Flags(), own_flags
        self._listen(range(self.workers))

    def hear(self) -> tuple[int, Report]:
        """Return the next worker that has reported, and its report."""
        posted = list(self._posted.items())
        index = self._push.wait_any([request for _, request in posted])
        return posted[index][0], self._read(posted[index][0])

    def hear_from(self, worker: int) -> Report:
        """Return the report of `worker`, once it has arrived."""
        self._posted[worker].wait()
        return self._read(worker)

    def tell(self, answers: Sequence[Answer]) -> None:
        """Send `answers` to their workers."""
        for answer in answers:
            if answer.worker in self._sent:  # it has reported since, so this does not wait
                self._sent[answer.worker][0].wait()
            x = np.array(answer, np.int64)
            self._sent[answer.worker] = self._pull.isend(x, self._ranks[answer.worker]), x

    def listen_again(self, answers: Sequence[Answer]) -> None:
        """Post a receive for the next report of each worker that was answered.

        Call it only after its gradient has been received: one link carries both, in order.
        """
        self._listen(answer.worker for answer in answers)

    def _listen(self, workers: Iterable[int]) -> None:
        for w in workers:
            self._posted[w] = self._push.irecv(self._inbox[w], self._ranks[w])

    def _read(self, worker: int) -> Report:
        # Its next request goes to the end of the list, so that no worker is passed over.
        del self._posted[worker]
        report = Report.decoded(self._inbox[worker])
        self.flags = self.flags.joined(report.flags).joined(self._own_flags())
        return report
