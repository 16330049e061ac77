"""Two workers average their parameters: the active side and the passive side; see ad_psgd.py.

    active      main     [ gradient at x ............... ]  x <- m - update
                thread   x -> ...................... <- m
    passive     main     [ gradient at a copy of x ......... ]  x <- x - update, copy
                thread   receives x_a:  x, m <- (x + x_a) / 2, sends m

Two threads share the x of a passive worker and take turns, see turns.py.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from hpctrain.core.xp import finish, own_stream
from hpctrain.engines.background import background_executor
from hpctrain.engines.engine import Times
from hpctrain.engines.gossip.turns import END_TURN, OWN_TURN, TurnLock, make_turn_lock
from hpctrain.engines.replay import Recorder
from hpctrain.nn import Key
from hpctrain.transport.link import Link, Request, wait_all
from hpctrain.world import World

_RANDOM_STREAM = 4  # in Philox's counter: separates these random numbers from other uses
AVERAGE_MESSAGE, FINISH_MESSAGE = 1, 0  # the header of each message of an active worker
ApplyUpdate = Callable[[np.ndarray], None]


def choose_partner(seed: int, worker: int, step: int, workers: int) -> int:
    """Return a random passive worker: the partner of the active `worker` in its `step`."""
    key = np.array([seed, worker], dtype=np.uint64)
    random_word = np.random.Philox(key=key, counter=(step, 0, 0, _RANDOM_STREAM)).random_raw()
    return int(random_word) % (workers // 2) * 2 + 1


class ActiveWorker:
    """A worker that averages with a passive worker in each step, in a second thread."""

    def __init__(self, world: World, times: Times, param: np.ndarray, link: Link):
        """Average `param`; only the second thread uses `link`.

        `param` may not change between `start_averaging` and `apply_gradient`.
        """
        self._param, self._link, self._times, self._trace = param, link, times, world.trace
        self._mean = np.zeros_like(param)
        self._executor = background_executor(world.concurrent, "gossip", param)
        self._averaging: Future[None] | None = None

    def server_body(self, recorder: Recorder, start: int, until: int) -> None:
        """Return no function: an active worker serves nobody."""

    def start_averaging(self, key: Key) -> None:
        """Start the averaging in the second thread."""
        peer = choose_partner(key.seed, self._link.rank, key.step, self._link.size)
        self._averaging = self._executor.submit(self._average_with, peer)

    def apply_gradient(self, update: ApplyUpdate | None) -> None:
        """Wait for the averaging; then apply the gradient by `update`, if it is not None."""
        assert self._averaging is not None
        with self._times.wait(self._trace, "wait for partner"):
            self._averaging.result()
        self._param[...] = self._mean
        if update is not None:
            update(self._param)

    def finish_averaging(self) -> None:
        """Inform all passive workers that this worker sends no more parameters."""
        self._executor.submit(self._send_finish).result()

    def end_interval(
        self, recorder: Recorder, start: int, until: int, turns: Callable[[], list[int]]
    ) -> None:
        """Do nothing: the turns are the partners'."""

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown()

    def _average_with(self, peer: int) -> None:
        with self._trace.span("gossip", "wire", bytes=self._param.nbytes, rank=peer) as wire_span:
            header = np.array([AVERAGE_MESSAGE])
            reply = self._link.irecv(self._mean, peer)
            wait_all((self._link.isend(header, peer), self._link.isend(self._param, peer)))
            reply.wait()
        self._times.wire_s += wire_span.seconds

    def _send_finish(self) -> None:
        header = np.array([FINISH_MESSAGE])
        for passive_rank in range(1, self._link.size, 2):
            self._link.isend(header, passive_rank).wait()


class PassiveWorker:
    """A worker whose second thread averages with each active worker that sends parameters."""

    def __init__(
        self, world: World, times: Times, param: np.ndarray, link: Link, row_link: Link | None
    ):
        """Compute gradients at `param`, a copy of the average; only the thread uses `link`.

        `row_link` connects the ranks of this worker's row on a mesh, for turns alone.
        """
        self._param, self._link, self._times, self._trace = param, link, times, world.trace
        self._averaged_param, self._inbox = np.zeros_like(param), np.zeros_like(param)
        self._row_link, self._turn_lock = row_link, TurnLock()
        self._is_first = row_link is None or row_link.rank == 0  # of its row: it has the log

    def server_body(self, recorder: Recorder, start: int, until: int) -> Callable[[], list[int]]:
        """Return the function that the thread runs; it returns the list of turns at the end.

        A replay repeats the turns of the log from step `start` to `until`.
        """
        repeats = recorder.is_replay and self._is_first
        interval = recorder.next_interval(start, until) if repeats else {}
        self._averaged_param[...] = self._param
        finish(self._averaged_param)  # another thread reads these parameters, on its own stream
        active_workers = len(self._active_ranks)
        self._turn_lock = make_turn_lock(self._row_link, active_workers, interval.get("turns"))
        return self._serve

    def start_averaging(self, key: Key) -> None:
        """Do nothing: active workers choose when to average."""

    def apply_gradient(self, update: ApplyUpdate | None) -> None:
        """Apply the gradient to the present average by `update`, if it is not None."""
        if update is not None:
            with self._turn_lock.turn(OWN_TURN):
                update(self._averaged_param)
                self._param[...] = self._averaged_param
                finish(self._averaged_param)

    def finish_averaging(self) -> None:
        """Do nothing: the thread serves until all active workers have finished."""

    def end_interval(
        self, recorder: Recorder, start: int, until: int, turns: Callable[[], list[int]]
    ) -> None:
        """Record the turns of the thread, and copy the average into `param`."""
        if self._is_first:
            recorder.record_interval(start, until, turns=turns())
        self._param[...] = self._averaged_param

    def close(self) -> None:
        """Do nothing: the thread ends with each training."""

    def _serve(self) -> list[int]:
        headers = np.zeros((self._link.size, 1), np.int64)
        receives = {rank: self._link.irecv(headers[rank], rank) for rank in self._active_ranks}
        try:
            with own_stream(self._averaged_param):
                while receives:
                    peer = self._wait_for_sender(receives)
                    if headers[peer] == AVERAGE_MESSAGE:
                        self._average_with(peer)
                        receives[peer] = self._link.irecv(headers[peer], peer)
                    else:  # recorded as a turn: in a replay a later message may wait for this one
                        with self._turn_lock.turn(END_TURN - peer):
                            pass
            self._turn_lock.finish()
        except BaseException:
            self._turn_lock.abort()
            raise
        return self._turn_lock.history

    @property
    def _active_ranks(self) -> range:
        return range(0, self._link.size, 2)

    def _wait_for_sender(self, receives: dict[int, Request]) -> int:
        """Wait for a header, of any active worker or of the next in turn; return the worker."""
        sender = self._turn_lock.next_sender()
        if sender is not None:
            receives.pop(sender).wait()
            return sender
        # The latest sender is last in the list, so that no worker starves.
        peer = list(receives)[self._link.wait_any(list(receives.values()))]
        del receives[peer]
        return peer

    def _average_with(self, peer: int) -> None:
        mean, param = self._inbox, self._averaged_param
        with self._trace.span("gossip", "wire", bytes=param.nbytes, rank=peer) as wire_span:
            self._link.irecv(mean, peer).wait()
            with self._turn_lock.turn(peer):
                mean += param
                mean /= 2
                param[...] = mean
                finish(param)
            self._link.isend(mean, peer).wait()
        self._times.wire_s += wire_span.seconds
