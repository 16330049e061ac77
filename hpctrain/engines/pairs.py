"""Two workers average their parameters: the active side of it, and the passive; see ad_psgd.py.

    active      main     [ gradient at x ............... ]  x <- m - update
                thread   x -> ...................... <- m
    passive     main     [ gradient at a copy of x ......... ]  x <- x - update, copy
                thread   takes x_a:  x, m <- (x + x_a) / 2, sends m

A passive worker's x belongs to two threads, which take turns: in any order, which is noted, or in
the order that was noted in the run that is repeated.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np

from hpctrain.engines.aside import aside
from hpctrain.engines.engine import Times
from hpctrain.errors import TransportError
from hpctrain.nn import Key
from hpctrain.transport.link import Link, Request
from hpctrain.world import World
from hpctrain.xp import finish, own_stream

_STREAM = 4  # keeps this stream apart from others that use Philox with a key of (seed, number)
#: In a list of turns: a gradient of the worker's own, or LEFT less the active worker that left;
OWN, LEFT = -1, -2  # any other number is the active worker that it met
MEET, LEAVE = 1, 0  # what an active worker says first
Take = Callable[[np.ndarray], None]


def actives(workers: int) -> list[int]:
    """Return who may choose to meet whom: every other worker, so that no two of them meet."""
    return list(range(0, workers, 2))


def partner(seed: int, worker: int, step: int, workers: int) -> int:
    """Return the passive worker that active `worker` meets in a step of its own: from Philox."""
    key = np.array([seed, worker], dtype=np.uint64)
    word = np.random.Philox(key=key, counter=(step, 0, 0, _STREAM)).random_raw()
    return int(word) % (workers // 2) * 2 + 1


class Active:
    """A worker that meets another in each step, in a thread beside its gradient."""

    def __init__(self, world: World, times: Times, param: np.ndarray, link: Link):
        """Exchange `param`, which nobody writes from `begin` to `take`; `link` is the thread's."""
        self._param, self._link, self._times, self._trace = param, link, times, world.trace
        self._mean = np.zeros_like(param)
        self._aside = aside(world.concurrent, "gossip", param)
        self._meeting: Future[None] | None = None

    def begin(self, key: Key) -> None:
        """Begin to average, for a gradient that is made meanwhile."""
        other = partner(key.seed, self._link.rank, key.step, self._link.size)
        self._meeting = self._aside.submit(self._meet, other)

    def take(self, update: Take | None) -> None:
        """End the averaging, then take the gradient, if it can be taken."""
        assert self._meeting is not None
        with self._trace.span("wait for another", "wait") as waiting:
            self._meeting.result()
        self._times.wait_s += waiting.seconds
        self._param[...] = self._mean
        if update is not None:
            update(self._param)

    def leave(self) -> None:
        """Tell all that we meet nobody any more."""
        self._aside.submit(self._say_so).result()

    def close(self) -> None:
        """End the thread."""
        self._aside.shutdown()

    def _meet(self, other: int) -> None:
        with self._trace.span("gossip", "wire", bytes=self._param.nbytes, rank=other) as wire:
            said = np.array([MEET])
            back = self._link.irecv(self._mean, other)
            for request in (self._link.isend(said, other), self._link.isend(self._param, other)):
                request.wait()
            back.wait()
        self._times.wire_s += wire.seconds

    def _say_so(self) -> None:
        said = np.array([LEAVE])
        for passive in range(1, self._link.size, 2):
            self._link.isend(said, passive).wait()


class Passive:
    """A worker whose second thread answers all who want to meet it."""

    def __init__(self, world: World, times: Times, param: np.ndarray, link: Link):
        """Let gradients be made at `param`, a copy of what is averaged; `link` is the thread's."""
        self._param, self._link, self._times, self._trace = param, link, times, world.trace
        self._x, self._inbox = np.zeros_like(param), np.zeros_like(param)
        self._actives = actives(link.size)
        self._turns = Turns()

    def answering(self, told: Sequence[int] | None) -> Callable[[], list[int]]:
        """Return what the thread does from now on until all have left, and gives back the turns.

        `told` are the turns to be repeated, if any are.
        """
        self._x[...] = self._param
        finish(self._x)  # another thread reads it, on a stream of its own
        self._turns = Turns(told)
        return self._answer

    def begin(self, key: Key) -> None:
        """Do nothing: others choose when to average."""

    def take(self, update: Take | None) -> None:
        """Take the gradient, if it can be taken, wherever averaging has led meanwhile."""
        if update is not None:
            with self._turns.turn(OWN):
                update(self._x)
                self._param[...] = self._x
                finish(self._x)

    def leave(self) -> None:
        """Do nothing: as long as others want to meet, there is an answer."""

    def end(self) -> None:
        """Bring into `param` what averaging has led to, once the thread is through."""
        self._param[...] = self._x

    def close(self) -> None:
        """Do nothing: the thread ends with each training."""

    def _answer(self) -> list[int]:
        with own_stream(self._x):
            return self._answer_all()

    def _answer_all(self) -> list[int]:
        header = np.zeros((self._link.size, 1), np.int64)
        posted = {a: self._link.irecv(header[a], a) for a in self._actives}
        told = deque(self._turns.told_others)
        try:
            while posted:
                other = self._heard(posted, told)
                if header[other] == MEET:
                    self._meet(other)
                    posted[other] = self._link.irecv(header[other], other)
                else:  # a turn too: who was heard later may have waited for the one that left
                    with self._turns.turn(LEFT - other):
                        pass
        except BaseException:
            self._turns.break_off()
            raise
        return self._turns.taken

    def _heard(self, posted: dict[int, Request], told: deque[int]) -> int:
        """Return who has said something: who comes first, or comes next in what was `told`."""
        if self._turns.repeats:
            posted.pop(other := told.popleft()).wait()
            return other
        # The one that was met last is last in the list, so that nobody is passed over.
        other = list(posted)[self._link.wait_any(list(posted.values()))]
        del posted[other]
        return other

    def _meet(self, other: int) -> None:
        with self._trace.span("gossip", "wire", bytes=self._x.nbytes, rank=other) as wire:
            mean = self._inbox
            self._link.irecv(mean, other).wait()
            with self._turns.turn(other):
                mean += self._x
                mean /= 2
                self._x[...] = mean
                finish(self._x)
            self._link.isend(mean, other).wait()
        self._times.wire_s += wire.seconds


class Turns:
    """Two threads' turns at one thing: one after the other, and noted, or in an order told."""

    def __init__(self, told: Sequence[int] | None = None):
        self.taken: list[int] = []
        self._told, self._broken, self._changed = told, False, threading.Condition()

    @property
    def repeats(self) -> bool:
        return self._told is not None

    @property
    def told_others(self) -> list[int]:
        """The others that are to be heard, in their order."""
        return [who if who >= 0 else LEFT - who for who in self._told or () if who != OWN]

    @contextmanager
    def turn(self, who: int) -> Iterator[None]:
        """Wait for our turn, and have it; raise TransportError if the other thread has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self._is_next(who))
            if self._broken:
                raise TransportError("the thread that answers other workers has failed")
            yield
            self.taken.append(who)
            self._changed.notify_all()

    def break_off(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def _is_next(self, who: int) -> bool:
        return self._told is None or self._told[len(self.taken)] == who
