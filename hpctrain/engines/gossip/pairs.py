"""Two workers average their parameters: the active side and the passive side; see ad_psgd.py.

    active      main     [ gradient at x ............... ]  x <- m - update
                thread   x -> ...................... <- m
    passive     main     [ gradient at a copy of x ......... ]  x <- x - update, copy
                thread   takes x_a:  x, m <- (x + x_a) / 2, sends m

A passive worker's x belongs to two threads, which take turns: in any order, which is recorded,
or in the recorded order of the run that is replayed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np

from hpctrain.core.errors import TransportError
from hpctrain.core.xp import finish, own_stream
from hpctrain.engines.background import aside
from hpctrain.engines.engine import Times
from hpctrain.nn import Key
from hpctrain.transport.link import Link, Request
from hpctrain.world import World

_STREAM = 4  # keeps this stream apart from others that use Philox with a key of (seed, number)
#: In a list of turns: a gradient of the worker's own, or LEFT less the active worker that left;
OWN, LEFT = -1, -2  # any other number is the active worker that it met
MEET, LEAVE = 1, 0  # the header of each message of an active worker
Take = Callable[[np.ndarray], None]


def actives(workers: int) -> list[int]:
    """Return the active workers, every second one; they choose passive partners only."""
    return list(range(0, workers, 2))


def partner(seed: int, worker: int, step: int, workers: int) -> int:
    """Return the passive worker that active `worker` meets in a step of its own: from Philox."""
    key = np.array([seed, worker], dtype=np.uint64)
    word = np.random.Philox(key=key, counter=(step, 0, 0, _STREAM)).random_raw()
    return int(word) % (workers // 2) * 2 + 1


class Active:
    """A worker that averages with a passive one in each step, in a thread beside its gradient."""

    def __init__(self, world: World, times: Times, param: np.ndarray, link: Link):
        """Exchange `param`, not written from `begin` to `take`; the thread alone uses `link`."""
        self._param, self._link, self._times, self._trace = param, link, times, world.trace
        self._mean = np.zeros_like(param)
        self._aside = aside(world.concurrent, "gossip", param)
        self._meeting: Future[None] | None = None

    def begin(self, key: Key) -> None:
        """Start the averaging; the gradient is computed meanwhile."""
        other = partner(key.seed, self._link.rank, key.step, self._link.size)
        self._meeting = self._aside.submit(self._meet, other)

    def take(self, update: Take | None) -> None:
        """Wait for the averaging, then apply the gradient with `update` unless that is None."""
        assert self._meeting is not None
        with self._trace.span("wait for another", "wait") as waiting:
            self._meeting.result()
        self._times.wait_s += waiting.seconds
        self._param[...] = self._mean
        if update is not None:
            update(self._param)

    def leave(self) -> None:
        """Tell all passive workers that this one sends no more parameters."""
        self._aside.submit(self._send_leave).result()

    def close(self) -> None:
        """End the thread."""
        self._aside.shutdown()

    def _meet(self, other: int) -> None:
        with self._trace.span("gossip", "wire", bytes=self._param.nbytes, rank=other) as wire:
            header = np.array([MEET])
            back = self._link.irecv(self._mean, other)
            for request in (self._link.isend(header, other), self._link.isend(self._param, other)):
                request.wait()
            back.wait()
        self._times.wire_s += wire.seconds

    def _send_leave(self) -> None:
        header = np.array([LEAVE])
        for passive in range(1, self._link.size, 2):
            self._link.isend(header, passive).wait()


class Passive:
    """A worker whose second thread averages with every active worker that sends to it."""

    def __init__(self, world: World, times: Times, param: np.ndarray, link: Link):
        """Compute gradients at `param`, a copy of the average; the thread alone uses `link`."""
        self._param, self._link, self._times, self._trace = param, link, times, world.trace
        self._x, self._inbox = np.zeros_like(param), np.zeros_like(param)
        self._actives = actives(link.size)
        self._turns = Turns()

    def answering(self, turns: Sequence[int] | None) -> Callable[[], list[int]]:
        """Return the body of the thread: it answers until all have left, and returns the turns.

        `turns` are those of the log if the run is a replay.
        """
        self._x[...] = self._param
        finish(self._x)  # another thread reads it, on a stream of its own
        self._turns = Turns(turns)
        return self._answer

    def begin(self, key: Key) -> None:
        """Do nothing: active workers choose when to average."""

    def take(self, update: Take | None) -> None:
        """Apply the gradient to the parameters as averaged so far, unless `update` is None."""
        if update is not None:
            with self._turns.turn(OWN):
                update(self._x)
                self._param[...] = self._x
                finish(self._x)

    def leave(self) -> None:
        """Do nothing: the thread answers until all active workers have left."""

    def end(self) -> None:
        """Copy the averaged parameters into `param`, after the thread has ended."""
        self._param[...] = self._x

    def close(self) -> None:
        """Do nothing: the thread ends with each training."""

    def _answer(self) -> list[int]:
        with own_stream(self._x):
            return self._answer_all()

    def _answer_all(self) -> list[int]:
        header = np.zeros((self._link.size, 1), np.int64)
        posted = {a: self._link.irecv(header[a], a) for a in self._actives}
        logged = deque(self._turns.logged_actives)
        try:
            while posted:
                other = self._next_sender(posted, logged)
                if header[other] == MEET:
                    self._meet(other)
                    posted[other] = self._link.irecv(header[other], other)
                else:  # a turn too: a later sender may have waited for the one that left
                    with self._turns.turn(LEFT - other):
                        pass
        except BaseException:
            self._turns.break_off()
            raise
        return self._turns.history

    def _next_sender(self, posted: dict[int, Request], logged: deque[int]) -> int:
        """Return the worker whose header has arrived: any, or the next one of `logged`."""
        if self._turns.repeats:
            posted.pop(other := logged.popleft()).wait()
            return other
        # The latest partner is last in the list, so that no worker is passed over.
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
    """Mutual exclusion of two threads that records the order of turns, or follows an `order`."""

    def __init__(self, order: Sequence[int] | None = None):
        self.history: list[int] = []
        self._order, self._broken, self._changed = order, False, threading.Condition()

    @property
    def repeats(self) -> bool:
        return self._order is not None

    @property
    def logged_actives(self) -> list[int]:
        """The active workers of the log, in the order of their messages."""
        return [turn if turn >= 0 else LEFT - turn for turn in self._order or () if turn != OWN]

    @contextmanager
    def turn(self, entry: int) -> Iterator[None]:
        """Hold the turn `entry`; raise TransportError if the other thread has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self._is_next(entry))
            if self._broken:
                raise TransportError("the thread that answers other workers has failed")
            yield
            self.history.append(entry)
            self._changed.notify_all()

    def break_off(self) -> None:
        """End all waiting for turns with an error."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def _is_next(self, entry: int) -> bool:
        return self._order is None or self._order[len(self.history)] == entry
