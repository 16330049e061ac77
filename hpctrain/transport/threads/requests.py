"""Transfers between threads: a receive copies out of the array that was sent."""

from __future__ import annotations

from collections import deque

import numpy as np

from hpctrain.core.errors import TransportError
from hpctrain.transport.threads.hub import SentMessage
from hpctrain.transport.threads.waits import LocalWaits


class Send:
    """A send under way."""

    def __init__(self, waits: LocalWaits, message: SentMessage, peer: int):
        self._waits, self._message, self._peer = waits, message, peer

    def is_finished(self) -> bool:
        return self._message.done

    done = is_finished

    def wait(self) -> None:
        call = f"isend of {self._message.x.nbytes} bytes to rank {self._peer}"
        self._waits.wait_until(self.is_finished, call, self._peer)


class Receive:
    """A receive under way."""

    def __init__(
        self, waits: LocalWaits, x: np.ndarray, source: int, pending_receives: deque[Receive]
    ):
        """`pending_receives`: from `source`, in the order in which they were posted."""
        self._waits, self._x, self._source, self._done = waits, x, source, False
        self._pending_receives = pending_receives

    def is_finished(self) -> bool:
        """Complete receives from this source in the order in which they were posted."""
        pending = self._pending_receives
        mailbox = self._waits.hub.mailboxes[self._source, self._waits.rank]
        while mailbox and pending and not self._done:
            pending.popleft().receive_message(mailbox.popleft())
        return self._done

    def done(self) -> bool:
        with self._waits.hub.lock:
            if self.is_finished():
                return True
        self._waits.must_be_open("irecv", self._source)
        return False

    def wait(self) -> None:
        call = f"irecv of {self._x.nbytes} bytes from rank {self._source}"
        self._waits.wait_until(self.is_finished, call, self._source)

    def receive_message(self, message: SentMessage) -> None:
        if message.x.nbytes != self._x.nbytes:
            raise TransportError(
                f"rank {self._waits.rank}: irecv from rank {self._source} expected "
                f"{self._x.nbytes} bytes, {message.x.nbytes} came"
            )
        self._x[...] = message.x
        self._done = message.done = True
        self._waits.hub.wakeups[self._source].notify_all()
