"""Tagged messages over MPI: the sends and receives of guest frameworks, also from any source.

A Link has neither tags nor a receive from any source, since its order could not be replayed. The
ranks of a guest framework match their messages by tags of the user, and post receives that any rank
may answer: on a communicator of their own, where no message of a Link travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np

from hpctrain.core.errors import TransportError
from hpctrain.transport.link import Link
from hpctrain.transport.mpi.calls import calls_of
from hpctrain.transport.mpi.requests import Spec, buffer_spec, cut_pieces
from hpctrain.transport.pace import SPIN_S, Pace

from mpi4py import MPI  # isort: skip  (calls.py has kept mpi4py from starting MPI)

ANY_RANK = MPI.ANY_SOURCE  #: as a source: whichever rank sends first


class TaggedMessages:
    """Sends and receives of one rank; any thread may call."""

    def __init__(self, link: Link, on_loss: Callable[[], NoReturn]):
        """Take over `link`, which must be used by nobody else; `on_loss` ends the job."""
        self._on_loss = on_loss
        self.rank, self.size = link.rank, link.size
        self._link, self._calls = link, calls_of(link)
        self._comm = self._calls.comm
        #: MPI's largest tag; others are refused
        self.max_tag: int = self._comm.Get_attr(MPI.TAG_UB)  # type: ignore[assignment]

    def isend(self, x: np.ndarray, dest: int, tag: int) -> TaggedRequest:
        """Start to send contiguous `x` to rank `dest`."""
        specs = self._specs(x, tag)
        pieces = self._post(self._comm.Isend, specs, dest, tag)
        return TaggedRequest(self, pieces, dest, tag)

    def irecv(self, x: np.ndarray, source: int, tag: int) -> TaggedRequest:
        """Start to fill contiguous `x` from rank `source`, or from `ANY_RANK`.

        The first piece of a long message from any rank tells the source of the later pieces.
        """
        specs = self._specs(x, tag)
        posted_at_once = 1 if source == ANY_RANK else len(specs)
        pieces = self._post(self._comm.Irecv, specs[:posted_at_once], source, tag)
        unposted = specs[posted_at_once:]
        return TaggedRequest(self, pieces, source, tag, x.nbytes, unposted=unposted)

    def post_rest(self, specs: Sequence[Spec], source: int, tag: int) -> list[MPI.Request]:
        """Return requests for the remaining pieces of a message, whose source is known now."""
        return self._post(self._comm.Irecv, specs, source, tag)

    def _post(
        self, start: Callable[..., MPI.Request], specs: Sequence[Spec], peer: int, tag: int
    ) -> list[MPI.Request]:
        try:
            return [start(spec, peer, tag) for spec in specs]
        except MPI.Exception as error:
            self.end_if_lost(error)
            raise

    def end_if_lost(self, error: MPI.Exception) -> None:
        """End the job if a lost rank may be the cause of `error`."""
        if self._calls.family.reports_loss(error):
            self._calls.family.revoke()
            self._on_loss()

    def free(self) -> None:
        """Give the communicator back to MPI; all ranks must call."""
        self._link.endpoint.free()

    def _specs(self, x: np.ndarray, tag: int) -> list[Spec]:
        """Return the buffers of the pieces of `x`; raise TransportError for an invalid tag."""
        if not 0 <= tag <= self.max_tag:
            raise TransportError(f"expected a tag in 0 .. {self.max_tag}, seen {tag}")
        return [buffer_spec(piece) for piece in cut_pieces(x, self._calls.max_piece_bytes)]


class TaggedRequest:
    """A message under way; its array must not be touched before `wait` returns."""

    def __init__(
        self,
        messages: TaggedMessages,
        pieces: list[MPI.Request],
        peer: int,
        tag: int,
        expected_bytes: int | None = None,
        *,
        unposted: Sequence[Spec] = (),
    ):
        """Exchange `pieces`, later `unposted`, with `peer`; only a receive has `expected_bytes`."""
        peer_text = "any rank" if peer == ANY_RANK else f"rank {peer}"
        verb = "send to" if expected_bytes is None else "receive from"
        self.name, self.peer, self.expected_bytes = f"{verb} {peer_text}", peer, expected_bytes
        self._messages, self._pieces, self.tag, self._unposted = messages, pieces, tag, unposted
        self._status, self._received_bytes = MPI.Status(), 0

    def is_complete(self) -> bool:
        """Return whether the message has been sent or received; does not wait.

        Raises TransportError if a message of another length arrived.
        """
        status = self._status
        try:
            while self._pieces and self._pieces[0].Test(status):
                self._pieces.pop(0)
                if self.expected_bytes is not None:
                    self.peer = status.Get_source()
                    self._received_bytes += status.Get_count(MPI.BYTE)
                if self._unposted:
                    self._pieces = self._messages.post_rest(self._unposted, self.peer, self.tag)
                    self._unposted = ()
        except MPI.Exception as error:
            self._messages.end_if_lost(error)
            raise self._make_error(str(error)) from error
        if self._pieces:
            return False
        if self.expected_bytes not in (None, self._received_bytes):
            raise self._make_error(f"{self._received_bytes} came")
        return True

    def wait(self, limit_s: float) -> bool:
        """Return whether the message is complete within `limit_s`.

        Polls for a moment, then naps between polls: the core is left to threads that compute.
        """
        if not self.is_complete():
            try:
                Pace(SPIN_S, limit_s).until(self.is_complete)
            except TimeoutError:
                return False
        return True

    def _make_error(self, actual: str) -> TransportError:
        return TransportError(
            f"rank {self._messages.rank}: {self.name}, tag {self.tag}, expected "
            f"{self.expected_bytes} bytes, but: {actual}. Sender and receiver must give tensors of "
            "the same length and dtype."
        )
