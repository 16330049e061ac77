"""A transfer over MPI: an array is cut into pieces, and a request waits for every piece.

transport/mpi/link.py imports this after calls.py has kept mpi4py from starting MPI.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from mpi4py import MPI

from hpctrain.core.errors import TransportError
from hpctrain.core.xp import Array
from hpctrain.transport.mpi.calls import MpiCalls
from hpctrain.transport.pace import Pace

Spec = list[Any]  #: a buffer specification: buffer, bytes, MPI.BYTE


class MpiRequest:
    """The pieces of a transfer under way."""

    def __init__(
        self,
        calls: MpiCalls,
        pieces: list[MPI.Request],
        peer: int,
        expected_bytes: int,
        call: bytes,
    ):
        self._calls, self._pieces, self._peer, self._expected_bytes, self._call = (
            calls, pieces, peer, expected_bytes, call,
        )  # fmt: skip
        self._received_bytes = 0  # in pieces completed by `done`

    @property
    def last_piece(self) -> MPI.Request:
        """The piece that `wait_any` waits for; `wait` then completes the others."""
        return self._pieces[-1]

    def done(self) -> bool:
        """Return whether all pieces are complete, without waiting."""
        status = self._calls.status
        try:
            while self._pieces and self._pieces[0].Test(status):
                self._received_bytes += status.Get_count(MPI.BYTE)
                self._pieces.pop(0)
        except MPI.Exception as error:
            raise self._make_error(self._call.decode(), error) from error
        if not self._pieces:
            self._check_size(self._received_bytes)
        return not self._pieces

    def wait(self, external_bytes: int = 0) -> None:
        """Return when all pieces are complete; `external_bytes`: received by `wait_any`.

        One `Wait` per piece, never `Waitall`, which can hang if a peer was killed.
        """
        calls = self._calls
        calls.entry.enter(self._call, self._peer, self._expected_bytes)
        received_bytes = external_bytes + self._received_bytes
        try:
            received_bytes += sum(
                finish_piece(piece, calls.status, calls.pace) for piece in self._pieces
            )
        except MPI.Exception as error:
            raise self._make_error(self._call.decode(), error) from error
        except TimeoutError:
            raise calls.make_timeout(
                self._call.decode(), self._peer, self._expected_bytes
            ) from None
        self._check_size(received_bytes)
        calls.entry.leave()

    def _check_size(self, received_bytes: int) -> None:
        if self._expected_bytes and received_bytes != self._expected_bytes:
            raise self._make_error("irecv", f"{received_bytes} came")

    def _make_error(self, call: str, actual: object) -> TransportError:
        return self._calls.make_call_error(call, self._peer, self._expected_bytes, actual)


def cut_pieces(x: Array, max_piece_bytes: int) -> Iterator[Array]:
    """Yield contiguous `x` in views of at most `max_piece_bytes`; one view if `x` is empty."""
    if x.nbytes <= max_piece_bytes:
        yield x
        return
    flat, step = x.reshape(-1), max_piece_bytes // x.itemsize
    for start in range(0, flat.size, step):
        yield flat[start : start + step]


def buffer_spec(x: np.ndarray) -> Spec:
    """Return the MPI buffer of contiguous `x` in host memory; mpi4py would take others, too."""
    assert isinstance(x, np.ndarray)
    return [x, x.nbytes, MPI.BYTE]


@lru_cache(maxsize=4096)
def gpu_buffer_spec(pointer: int, nbytes: int) -> Spec:
    """Return the MPI buffer of GPU memory; cached, since making one costs microseconds."""
    return [MPI.memory.fromaddress(pointer, nbytes), nbytes, MPI.BYTE]


def finish_piece(piece: MPI.Request, status: MPI.Status, pace: Pace | None) -> int:
    """Wait for `piece` and return the bytes received; 0 if `wait_any` has completed it."""
    if piece == MPI.REQUEST_NULL:
        return 0
    if pace is None:
        piece.Wait(status)
    else:
        pace.until(lambda: piece.Test(status))
    return status.Get_count(MPI.BYTE)
