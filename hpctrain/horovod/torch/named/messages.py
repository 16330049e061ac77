"""Messages between the ranks of a process set and the first of them, its coordinator.

rank 1  --- requests --->  rank 0  --- decisions --->  all ranks
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hpctrain.core.errors import TransportError
from hpctrain.core.names import counted
from hpctrain.horovod.torch.named.coordinator import Coordinator
from hpctrain.horovod.torch.named.requests import Codec, Decision, Request
from hpctrain.transport.link import Link
from hpctrain.transport.mpi.mailbox import Mailbox
from hpctrain.transport.pace import SPIN_S, Pace

COORDINATOR = 0
_LAST = b""  #: the last message between two ranks; others have a length


class Messages:
    """Sends requests and receives decisions; one thread at a time may call."""

    def __init__(self, link: Link, ranks: Sequence[int]):
        """Take over `link` of the global `ranks`."""
        self.mailbox, self._codec = Mailbox(link), Codec()
        self._ended: set[int] = set()  # ranks whose last message has arrived
        self.coordinator = Coordinator(ranks) if link.rank == COORDINATOR else None

    def exchange(self, requests: Iterable[Request]) -> Iterator[list[Decision]]:
        """Submit `requests`; yield new decisions, by message."""
        submitted = list(map(Decision, requests))
        if self.coordinator is not None:
            yield self._number(self._decide(self.coordinator, submitted))
            return
        if submitted:
            self.mailbox.send(self._codec.encode(submitted), COORDINATOR)
        for _, message in self._receive():
            yield self._number(list(self._codec.decode(message)))

    def _decide(self, coordinator: Coordinator, submitted: Iterable[Decision]) -> list[Decision]:
        """Return the decisions on the requests of all ranks, after they were sent."""
        for own in submitted:
            coordinator.submit(COORDINATOR, own.request)
        for rank, message in self._receive():
            for other in self._codec.decode(message):
                coordinator.submit(rank, other.request)
        decisions = coordinator.take_decisions()
        if decisions and self.mailbox.size > 1:
            message = self._codec.encode(decisions)
            for rank in range(1, self.mailbox.size):
                self.mailbox.send(message, rank)
        return decisions

    def _receive(self) -> Iterator[tuple[int, bytes]]:
        """Yield the messages that have arrived, but last ones, which may come before `free`."""
        for rank, message in self.mailbox.receive():
            if message == _LAST:
                self._ended.add(rank)
            else:
                yield rank, message

    def _number(self, decisions: list[Decision]) -> list[Decision]:
        for decision in decisions:
            self._codec.add(decision)
        return decisions

    def free(self, limit_s: float) -> None:
        """Give back the link, once no message is on its way; all ranks must call.

        Raises TransportError if a rank has not called after `limit_s`.
        """
        peers = {COORDINATOR} if self.coordinator is None else {*range(1, self.mailbox.size)}
        for peer in peers:
            self.mailbox.send(_LAST, peer)

        def is_empty() -> bool:
            for _ in self._receive():
                pass
            return peers <= self._ended and not self.mailbox.has_unsent

        try:
            Pace(SPIN_S, limit_s).until(is_empty)
        except TimeoutError:
            raise TransportError(
                "communicators of Horovod are not given back: expected all ranks to call, seen no "
                f"call of {counted(len(peers - self._ended), 'rank')} within {limit_s:g} s"
            ) from None
        self.mailbox.free()
