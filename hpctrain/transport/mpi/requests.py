"""A transfer over MPI: the pieces in which an array travels, and the wait for them.

Imported by transport/mpi/link.py, which sets first how mpi4py starts MPI.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from hpctrain.core.errors import TransportError
from hpctrain.core.xp import Array
from hpctrain.watch import Entry

Spec = list[Any]  #: a buffer specification: buffer, bytes, MPI.BYTE
#: MPI waits by polling without a pause. A thread beside one that computes on the same cores sleeps
#: between polls, twice as long each time: 1 ms of 1 Gbit/s are 125 KB, which the kernel's buffers
#: hold meanwhile.
MIN_NAP_S, LONGEST_NAP_S = 50e-6, 1e-3
#: Polls in a row: UCX, in MPICH, takes no more than 64 KiB out of the kernel at a poll.
POLLS = 4


class SleepingWait:
    """Polling with sleeps: each wake-up takes some 20 us from the threads that compute.

    Segments arrive at the regular pace of the wire, so the first nap of a wait is a quarter of the
    last wait.
    """

    def __init__(self) -> None:
        self._first_s = MIN_NAP_S

    def wait(self, piece: MPI.Request, status: MPI.Status) -> None:
        """Return once `piece` is complete."""
        nap_s, start_s = self._first_s, time.perf_counter()
        while not any(piece.Test(status) for _ in range(POLLS)):
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, LONGEST_NAP_S)
            waited_s = time.perf_counter() - start_s
            self._first_s = min(max(waited_s / 4, MIN_NAP_S), LONGEST_NAP_S)


class Owner(Protocol):
    """The part of a link that its requests use."""

    entry: Entry
    sleeps_while_waiting: bool
    sleeping_wait: SleepingWait
    status: MPI.Status

    def failure(self, call: str, peer: int, size: int, actual: object) -> TransportError: ...


class MpiRequest:
    """The pieces of one transfer under way."""

    def __init__(
        self, link: Owner, pieces: list[MPI.Request], peer: int, expected: int, call: bytes
    ):
        self._link, self._pieces, self._peer, self._expected, self._call = (
            link, pieces, peer, expected, call,
        )  # fmt: skip
        self._received = 0  # bytes of pieces that `done` has completed

    @property
    def last(self) -> MPI.Request:
        """The piece that `wait_any` waits for; `wait` then completes the others."""
        return self._pieces[-1]

    def done(self) -> bool:
        """Return whether all pieces are complete, without waiting."""
        status = self._link.status
        try:
            while self._pieces and self._pieces[0].Test(status):
                self._received += status.Get_count(MPI.BYTE)
                self._pieces.pop(0)
        except MPI.Exception as error:
            raise self._failure(self._call.decode(), error) from error
        if not self._pieces:
            self._must_be_complete(self._received)
        return not self._pieces

    def wait(self, external_bytes: int = 0) -> None:
        """Return when all pieces are complete; `external_bytes`: bytes completed by `wait_any`.

        One `Wait` per piece, never `Waitall`: where a peer was killed, Waitall can hang.
        """
        link = self._link
        link.entry.enter(self._call, self._peer, self._expected)
        received = external_bytes + self._received
        try:
            sleeping_wait = link.sleeping_wait if link.sleeps_while_waiting else None
            received += sum(finish(piece, link.status, sleeping_wait) for piece in self._pieces)
        except MPI.Exception as error:
            raise self._failure(self._call.decode(), error) from error
        self._must_be_complete(received)
        link.entry.leave()

    def _must_be_complete(self, received: int) -> None:
        if self._expected and received != self._expected:
            raise self._failure("irecv", f"{received} came")

    def _failure(self, call: str, actual: object) -> TransportError:
        return self._link.failure(call, self._peer, self._expected, actual)


def cuts(x: Array, cut_bytes: int) -> Iterator[Array]:
    """Yield contiguous `x` in views of at most `cut_bytes`; an empty array is one empty piece."""
    if x.nbytes <= cut_bytes:
        yield x
        return
    flat, step = x.reshape(-1), cut_bytes // x.itemsize
    for start in range(0, flat.size, step):
        yield flat[start : start + step]


def spec(x: np.ndarray) -> Spec:
    """Return the MPI buffer of contiguous `x` in host memory."""
    return [x, x.nbytes, MPI.BYTE]


@lru_cache(maxsize=4096)
def spec_of_gpu(pointer: int, nbytes: int) -> Spec:
    """Return the MPI buffer of GPU memory; cached, since making one costs microseconds."""
    return [MPI.memory.fromaddress(pointer, nbytes), nbytes, MPI.BYTE]


def finish(piece: MPI.Request, status: MPI.Status, sleeping_wait: SleepingWait | None) -> int:
    """Return the number of bytes received, or 0 if this piece was completed elsewhere."""
    if piece == MPI.REQUEST_NULL:
        return 0
    if sleeping_wait is None:
        piece.Wait(status)
    else:
        sleeping_wait.wait(piece, status)
    return status.Get_count(MPI.BYTE)
