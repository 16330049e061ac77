"""The desk: where workers report to the first server, which decides what happens in which order.

A worker sends a *report*, the slices of its gradient behind it if it has one, and waits for the
*answer*: go on with which step, or stop. The first server makes an *event* of each decision, obeys
it and hands it to the other servers, who obey it too. So all servers see one sequence, and a list
of events is all that is needed to repeat an asynchronous run (see replay.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpctrain.engines.engine import Flags
from hpctrain.engines.shard import Order, Use
from hpctrain.transport.link import Link, Request


class Report(NamedTuple):
    """What a worker says; `gradient` and `wants` are 0 or 1."""

    gradient: int  #: the slices of a gradient, or of parameters, follow
    wants: int  #: the parameters shall come with leave to go on
    step: int  #: that the gradient is of
    steps: int  #: how many the worker has done since its last report
    targets: int  #: samples, or places in texts, that the gradient is the sum over
    of_targets: int  #: of so many in the whole batch
    flags: Flags

    def encoded(self) -> np.ndarray:
        """Return the numbers that travel."""
        return np.array([*self[:-1], *self.flags], np.int64)

    @classmethod
    def decoded(cls, numbers: np.ndarray) -> Report:
        """Return what `encoded` made the numbers of."""
        gradient, wants, step, steps, targets, of_targets, *flags = numbers.tolist()
        return cls(gradient, wants, step, steps, targets, of_targets, Flags(*flags))


class Answer(NamedTuple):
    """What a worker is told: `step` to go on with if `go`; the run has come to step `done`."""

    worker: int
    go: int  #: 0 for no further; at its own pace, how many steps before the next report
    step: int
    done: int


class Event(NamedTuple):
    """One decision: after `heard` have reported, servers obey `order` and `answers` are given."""

    heard: tuple[int, ...]
    order: Order
    answers: tuple[Answer, ...] = ()
    staleness: int | None = None  #: of the gradient that comes, where it may be stale

    @classmethod
    def from_json(cls, told: Sequence[Any]) -> Event:
        """Return the event that JSON made lists of."""
        heard, (pushed, use, factor, pull, over), answers, *staleness = told
        order = Order(tuple(pushed), Use(use), factor, tuple(pull), over)
        return cls(tuple(heard), order, tuple(Answer(*one) for one in answers), *staleness)


def over(workers: int, done: int) -> Event:
    """Return the event that ends an interval: all workers get the parameters as they are now."""
    everyone = tuple(range(workers))
    order = Order((), Use.NONE, 1.0, everyone, True)
    return Event((), order, tuple(Answer(w, 0, done, done) for w in everyone))


class Desk:
    """The first server's side: reports come by `push`, answers go by `pull`."""

    def __init__(self, push: Link, pull: Link, workers: Sequence[int]):
        """Serve `workers`, given as ranks."""
        self.flags = Flags()  #: all that was said since `open`, joined
        self._asked: Callable[[], Flags] = Flags
        self._push, self._pull, self._ranks = push, pull, workers
        numbers = len(Report._fields) - 1 + len(Flags._fields)
        self._inbox = np.zeros((len(workers), numbers), np.int64)
        self._posted: dict[int, Request] = {}
        self._told: dict[int, tuple[Request, np.ndarray]] = {}

    @property
    def workers(self) -> int:
        return len(self._ranks)

    def open(self, asked: Callable[[], Flags]) -> None:
        """Begin an interval: every worker reports, and `asked` tells what this rank has to say."""
        self.flags, self._asked = Flags(), asked
        self._listen(range(self.workers))

    def hear(self) -> tuple[int, Report]:
        """Return a worker that has reported and what it says, whoever comes first."""
        posted = list(self._posted.items())
        index = self._push.wait_any([request for _, request in posted])
        return posted[index][0], self._read(posted[index][0])

    def hear_from(self, worker: int) -> Report:
        """Return what `worker` says."""
        self._posted[worker].wait()
        return self._read(worker)

    def tell(self, answers: Sequence[Answer]) -> None:
        """Give `answers` to the workers they are for."""
        for answer in answers:
            if answer.worker in self._told:  # it has reported since, so this does not wait
                self._told[answer.worker][0].wait()
            x = np.array(answer, np.int64)
            self._told[answer.worker] = self._pull.isend(x, self._ranks[answer.worker]), x

    def listen_again(self, answers: Sequence[Answer]) -> None:
        """Expect a report of each worker that was answered.

        Only once its gradient has been received: the same link carries both, in order.
        """
        self._listen(answer.worker for answer in answers)

    def _listen(self, workers: Iterable[int]) -> None:
        for w in workers:
            self._posted[w] = self._push.irecv(self._inbox[w], self._ranks[w])

    def _read(self, worker: int) -> Report:
        # To the end: whoever reports next is last in the list, so that nobody is passed over.
        del self._posted[worker]
        report = Report.decoded(self._inbox[worker])
        self.flags = self.flags.joined(report.flags).joined(self._asked())
        return report
