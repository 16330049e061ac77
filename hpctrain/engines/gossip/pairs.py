"""Two workers average their parameters: the active side and the passive side; see ad_psgd.py.

    active      main     [ gradient at x ............... ]  x <- m - update
                thread   x -> ...................... <- m
    passive     main     [ gradient at a copy of x ......... ]  x <- x - update, copy
                thread   receives x_a:  x, m <- (x + x_a) / 2, sends m

A passive worker's x is shared by two threads, which take turns: in any order, which is recorded,
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
from hpctrain.engines.background import background_executor
from hpctrain.engines.engine import Times
from hpctrain.nn import Key
from hpctrain.transport.link import Link, Request
from hpctrain.world import World

_STREAM = 4  # separates this stream from others that use Philox with a key of (seed, number)
#: In a list of turns: OWN is a gradient of the worker, END - a the end of active worker a;
OWN, END = -1, -2  # any other number is the active worker of an averaging
AVERAGE, FINISH = 1, 0  # the header of each message of an active worker
ApplyUpdate = Callable[[np.ndarray], None]


def actives(workers: int) -> list[int]:
    """Return the active workers: those of even number; they choose passive partners only."""
    return list(range(0, workers, 2))


def partner(seed: int, worker: int, step: int, workers: int) -> int:
    """Return the passive worker that active `worker` averages with in its `step`, from Philox."""
    key = np.array([seed, worker], dtype=np.uint64)
    word = np.random.Philox(key=key, counter=(step, 0, 0, _STREAM)).random_raw()
    return int(word) % (workers // 2) * 2 + 1


class ActiveWorker:
    """Averages with a passive worker in each step, in a thread beside its gradient."""

    def __init__(self, world: World, times: Times, param: np.ndarray, link: Link):
        """Exchange `param`, not written from `begin` to `apply`; the thread alone uses `link`."""
        self._param, self._link, self._times, self._trace = param, link, times, world.trace
        self._mean = np.zeros_like(param)
        self._executor = background_executor(world.concurrent, "gossip", param)
        self._averaging: Future[None] | None = None

    def begin(self, key: Key) -> None:
        """Start the averaging; the gradient is computed meanwhile."""
        peer = partner(key.seed, self._link.rank, key.step, self._link.size)
        self._averaging = self._executor.submit(self._average_with, peer)

    def apply(self, update: ApplyUpdate | None) -> None:
        """Wait for the averaging, then apply the gradient with `update` unless that is None."""
        assert self._averaging is not None
        with self._trace.span("wait for partner", "wait") as waiting:
            self._averaging.result()
        self._times.wait_s += waiting.seconds
        self._param[...] = self._mean
        if update is not None:
            update(self._param)

    def finish(self) -> None:
        """Tell all passive workers that this one sends no more parameters."""
        self._executor.submit(self._send_finish).result()

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown()

    def _average_with(self, peer: int) -> None:
        with self._trace.span("gossip", "wire", bytes=self._param.nbytes, rank=peer) as wire:
            header = np.array([AVERAGE])
            reply = self._link.irecv(self._mean, peer)
            for request in (self._link.isend(header, peer), self._link.isend(self._param, peer)):
                request.wait()
            reply.wait()
        self._times.wire_s += wire.seconds

    def _send_finish(self) -> None:
        header = np.array([FINISH])
        for passive in range(1, self._link.size, 2):
            self._link.isend(header, passive).wait()


class PassiveWorker:
    """A worker whose second thread averages with every active worker that sends to it."""

    def __init__(self, world: World, times: Times, param: np.ndarray, link: Link):
        """Compute gradients at `param`, a copy of the average; the thread alone uses `link`."""
        self._param, self._link, self._times, self._trace = param, link, times, world.trace
        self._x, self._inbox = np.zeros_like(param), np.zeros_like(param)
        self._actives = actives(link.size)
        self._turns = Turns()

    def server(self, turns: Sequence[int] | None) -> Callable[[], list[int]]:
        """Return the body of the thread, which returns the turns when all workers have finished.

        `turns` are those of the log if the run is a replay.
        """
        self._x[...] = self._param
        finish(self._x)  # another thread reads it, on a stream of its own
        self._turns = Turns(turns)
        return self._serve

    def begin(self, key: Key) -> None:
        """Do nothing: active workers choose when to average."""

    def apply(self, update: ApplyUpdate | None) -> None:
        """Apply the gradient to the parameters as averaged so far, unless `update` is None."""
        if update is not None:
            with self._turns.turn(OWN):
                update(self._x)
                self._param[...] = self._x
                finish(self._x)

    def finish(self) -> None:
        """Do nothing: the thread serves until all active workers have finished."""

    def end(self) -> None:
        """Copy the averaged parameters into `param`, after the end of the thread."""
        self._param[...] = self._x

    def close(self) -> None:
        """Do nothing: the thread ends with each training."""

    def _serve(self) -> list[int]:
        with own_stream(self._x):
            return self._serve_all()

    def _serve_all(self) -> list[int]:
        header = np.zeros((self._link.size, 1), np.int64)
        posted = {a: self._link.irecv(header[a], a) for a in self._actives}
        logged = deque(self._turns.logged_actives)
        try:
            while posted:
                peer = self._next_sender(posted, logged)
                if header[peer] == AVERAGE:
                    self._average_with(peer)
                    posted[peer] = self._link.irecv(header[peer], peer)
                else:  # a turn too: a later message may have waited for this one
                    with self._turns.turn(END - peer):
                        pass
        except BaseException:
            self._turns.abort()
            raise
        return self._turns.history

    def _next_sender(self, posted: dict[int, Request], logged: deque[int]) -> int:
        """Return the worker whose header has arrived: any, or the next one of `logged`."""
        if self._turns.replays:
            posted.pop(peer := logged.popleft()).wait()
            return peer
        # The latest sender is last in the list, so that no worker starves.
        peer = list(posted)[self._link.wait_any(list(posted.values()))]
        del posted[peer]
        return peer

    def _average_with(self, peer: int) -> None:
        with self._trace.span("gossip", "wire", bytes=self._x.nbytes, rank=peer) as wire:
            mean = self._inbox
            self._link.irecv(mean, peer).wait()
            with self._turns.turn(peer):
                mean += self._x
                mean /= 2
                self._x[...] = mean
                finish(self._x)
            self._link.isend(mean, peer).wait()
        self._times.wire_s += wire.seconds


class Turns:
    """Mutual exclusion of two threads that records the order of turns, or follows an `order`."""

    def __init__(self, order: Sequence[int] | None = None):
        self.history: list[int] = []
        self._order, self._failed, self._changed = order, False, threading.Condition()

    @property
    def replays(self) -> bool:
        return self._order is not None

    @property
    def logged_actives(self) -> list[int]:
        """The active workers of the log, in the order of their messages."""
        return [turn if turn >= 0 else END - turn for turn in self._order or () if turn != OWN]

    @contextmanager
    def turn(self, entry: int) -> Iterator[None]:
        """Hold the turn `entry`; raise TransportError if the other thread has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._is_next(entry))
            if self._failed:
                raise TransportError("the thread that averages with other workers has failed")
            yield
            self.history.append(entry)
            self._changed.notify_all()

    def abort(self) -> None:
        """Raise an error in threads that wait for a turn."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def _is_next(self, entry: int) -> bool:
        return self._order is None or self._order[len(self.history)] == entry
