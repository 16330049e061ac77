"""The turns of the two threads that share the parameters of a passive worker; see pairs.py.

The order of turns is recorded, and a replay repeats it. On a mesh the ranks of a passive worker's
row hold different layers: pipe rank 0 decides on the order, and the others follow it.

    pipe rank 0    turns as messages arrive       [0]       [own]     [2]      any order
                                                   |          |        |
    pipe rank 1    turns as pipe rank 0 sends      `-> [0]    `-> [own] `-> [2]

An active worker sends its layers on all ranks of its row in the same steps. So a rank that follows
waits only for messages that pipe rank 0 has received from the same row.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from hpctrain.core.errors import TransportError
from hpctrain.transport.link import Link, Request

#: A list of turns holds OWN_TURN for a gradient of the passive worker itself, END_TURN - a for the
#: end of active worker a, and a for an averaging with active worker a.
OWN_TURN, END_TURN = -1, -2
MAX_PENDING_SENDS = 64


class TurnLock:
    """A mutex of two threads that records the order of turns, or enforces a given order."""

    def __init__(self, order: Sequence[int] | None = None):
        """Enforce `order`; with None allow any."""
        self.history: list[int] = []
        self._order, self._has_failed, self._condition = order, False, threading.Condition()
        turns = [turn for turn in order or () if turn != OWN_TURN]
        self._senders = deque(turn if turn >= 0 else END_TURN - turn for turn in turns)

    def next_sender(self) -> int | None:
        """Return the active worker that must send the next message; None if any worker may."""
        return None if self._order is None else self._senders.popleft()

    @contextmanager
    def turn(self, entry: int) -> Iterator[None]:
        """Hold the lock for turn `entry`; raise TransportError if the other thread has failed."""
        with self._condition:
            self._condition.wait_for(lambda: self._has_failed or self._is_next(entry))
            if self._has_failed:
                raise TransportError("the thread that averages with other workers has failed")
            self._begin_turn(entry)
            yield
            self._condition.notify_all()

    def finish(self) -> None:
        """Do nothing: all turns that depend on another thread have been taken."""

    def abort(self) -> None:
        """Raise an error in a thread that waits for its turn."""
        with self._condition:
            self._has_failed = True
            self._condition.notify_all()

    def _begin_turn(self, entry: int) -> None:
        self.history.append(entry)

    def _is_next(self, entry: int) -> bool:
        return self._order is None or self._order[len(self.history)] == entry


class LeadingTurnLock(TurnLock):
    """The lock of pipe rank 0, which sends each turn to the other ranks of its row."""

    def __init__(self, link: Link, active_workers: int, order: Sequence[int] | None = None):
        """Send by `link` until all `active_workers` have ended: then no order is left to decide."""
        super().__init__(order)
        self._link, self._active_workers = link, active_workers
        self._pending_sends: deque[tuple[Request, np.ndarray]] = deque()

    def finish(self) -> None:
        """Wait until all turns have been sent."""
        while self._pending_sends:
            self._pending_sends.popleft()[0].wait()

    def _begin_turn(self, entry: int) -> None:
        # Not at its end: an update that needs norms waits for the same turn of the other ranks.
        super()._begin_turn(entry)
        if not self._active_workers:
            return
        self._active_workers -= entry <= END_TURN
        message = np.array([entry])
        for rank in range(1, self._link.size):
            self._pending_sends.append((self._link.isend(message, rank), message))
        while len(self._pending_sends) > MAX_PENDING_SENDS:
            self._pending_sends.popleft()[0].wait()


class FollowingTurnLock(TurnLock):
    """The lock of another rank of the row, which takes the turns that pipe rank 0 sends."""

    def __init__(self, link: Link, active_workers: int):
        """Receive by `link` until all `active_workers` have ended; then allow any turn."""
        super().__init__()
        self._link, self._active_workers = link, active_workers
        self._received_turns = deque[int]()  # the turns that are not yet taken

    def next_sender(self) -> int:
        """Receive turns up to one for which a message of an active worker is needed."""
        message = np.array([OWN_TURN])
        while message[0] == OWN_TURN:
            self._link.irecv(message, 0).wait()
            with self._condition:
                self._received_turns.append(entry := int(message[0]))
                self._active_workers -= entry <= END_TURN
                self._condition.notify_all()
        return entry if entry >= 0 else END_TURN - entry

    def _begin_turn(self, entry: int) -> None:
        if self._received_turns:
            self._received_turns.popleft()

    def _is_next(self, entry: int) -> bool:
        return (
            self._received_turns[0] == entry if self._received_turns else not self._active_workers
        )


def make_turn_lock(
    link: Link | None, active_workers: int, order: Sequence[int] | None = None
) -> TurnLock:
    """Return the lock of this rank, whose row `link` connects; None without a mesh."""
    if link is None:
        return TurnLock(order)
    if link.rank == 0:
        return LeadingTurnLock(link, active_workers, order)
    return FollowingTurnLock(link, active_workers)
