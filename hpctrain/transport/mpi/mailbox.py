"""Messages of any length and from any rank: what ranks tell each other in no fixed order.

A Link receives only what it expects. Here a rank looks for messages when it has time, on a
communicator of its own, where no message of a Link travels.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.transport.link import Link
from hpctrain.transport.mpi.calls import TAG, calls_of

# calls.py has kept mpi4py from starting MPI
# isort: split
from mpi4py import MPI

from hpctrain.transport.mpi.fault_tolerance import ALL_PEERS, has_lost


class Mailbox:
    """Sends and receives bytes; one thread at a time may call."""

    def __init__(self, link: Link):
        """Take over `link`, which must be used by nobody else."""
        self.size = link.size
        self._link, self._calls, self._status = link, calls_of(link), MPI.Status()
        self._unsent: list[tuple[MPI.Request, bytes]] = []

    def send(self, message: bytes, dest: int) -> None:
        """Start to send `message`; later calls finish it."""
        try:
            self._forget_sent()
            self._unsent.append((self._calls.comm.Isend([message, MPI.BYTE], dest, TAG), message))
        except MPI.Exception as error:
            raise self._calls.make_call_error("send", dest, len(message), error) from error

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """Yield the rank and the bytes of each message that has arrived."""
        comm, status = self._calls.comm, self._status
        try:
            if self._unsent:
                self._forget_sent()
            while (message := comm.Improbe(MPI.ANY_SOURCE, TAG, status)) is not None:
                content = bytearray(status.Get_count(MPI.BYTE))
                message.Recv([content, MPI.BYTE])
                yield status.Get_source(), bytes(content)
        except MPI.Exception as error:
            raise self._calls.make_call_error("receive", ALL_PEERS, 0, error) from error

    @property
    def has_unsent(self) -> bool:
        """Whether messages are on their way: until then this rank must go on to receive."""
        return bool(self._unsent)

    def _forget_sent(self) -> None:
        self._unsent = [sent for sent in self._unsent if not sent[0].Test()]

    def check(self) -> None:
        """Raise LostRankError if a rank was lost; not on the path of a message."""
        if self._calls.family.survives and has_lost(self._calls.comm):
            raise self._calls.make_loss("receive")

    def free(self) -> None:
        """Give the communicator back to MPI; all ranks must call."""
        self._link.endpoint.free()
