"""Transfers between threads: a receive copies out of the array that was sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpctrain.core.errors import TransportError
from hpctrain.transport.threads.hub import SentMessage

if TYPE_CHECKING:
    from hpctrain.transport.threads.link import LocalLink


class Send:
    """A send under way."""

    def __init__(self, link: LocalLink, message: SentMessage, peer: int):
        self._link, self._message, self._peer = link, message, peer

    def is_finished(self) -> bool:
        return self._message.done

    def done(self) -> bool:
        return self._message.done

    def wait(self) -> None:
        call = f"isend of {self._message.x.nbytes} bytes to rank {self._peer}"
        self._link.wait_until(self.is_finished, call, self._peer)


class Receive:
    """A receive under way."""

    def __init__(self, link: LocalLink, x: np.ndarray, source: int):
        self._link, self._x, self._source, self._done = link, x, source, False

    def is_finished(self) -> bool:
        """Complete receives from this source in the order in which they were posted."""
        link = self._link
        mailbox, pending = (
            link.hub.mailboxes[self._source, link.rank],
            link.pending_receives[self._source],
        )
        while mailbox and pending and not self._done:
            pending.popleft().receive_message(mailbox.popleft())
        return self._done

    def done(self) -> bool:
        with self._link.hub.lock:
            if self.is_finished():
                return True
        self._link.must_be_open("irecv", self._source)
        return False

    def wait(self) -> None:
        call = f"irecv of {self._x.nbytes} bytes from rank {self._source}"
        self._link.wait_until(self.is_finished, call, self._source)

    def receive_message(self, message: SentMessage) -> None:
        if message.x.nbytes != self._x.nbytes:
            raise TransportError(
                f"rank {self._link.rank}: irecv from rank {self._source} expected "
                f"{self._x.nbytes} bytes, {message.x.nbytes} came"
            )
        self._x[...] = message.x
        self._done = message.done = True
        self._link.hub.wakeups[self._source].notify_all()
