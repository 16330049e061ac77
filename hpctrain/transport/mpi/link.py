"""The Link over MPI: bytes between ranks, on a communicator of our own.

Its import does not start MPI; see startup.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from hpctrain.core.xp import Array, namespace
from hpctrain.transport.device import transfers
from hpctrain.transport.link import Endpoint
from hpctrain.transport.mpi.calls import TAG, MpiCalls, MpiSurvivors
from hpctrain.transport.mpi.fault_tolerance import ALL_PEERS, Family
from hpctrain.transport.mpi.native import MpiCollectives
from hpctrain.transport.mpi.requests import (
    MpiRequest,
    Spec,
    buffer_spec,
    cut_pieces,
    finish_piece,
    gpu_buffer_spec,
)
from hpctrain.transport.pace import Pace
from hpctrain.watch import Entry

from mpi4py import MPI  # isort: skip  (calls.py has kept mpi4py from starting MPI)

#: Open MPI refuses counts above 2^31 - 1; longer messages travel in pieces of this many bytes.
MAX_PIECE_BYTES = 1 << 30


class MpiLink(transfers.QueuedLink):
    """One rank's view of a communicator; see `hpctrain.transport.link.Link`."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        entry: Entry,
        max_piece_bytes: int = MAX_PIECE_BYTES,
        family: Family | None = None,
    ):
        """Take over `comm` for exclusive use; `entry` is this thread's watch record.

        `family`: of the communicator that `comm` was derived from.
        """
        self.rank, self.size = comm.rank, comm.size
        self._isend, self._irecv, self._sendrecv = comm.Isend, comm.Irecv, comm.Sendrecv
        self._calls = calls = MpiCalls(comm, entry, family or Family(), max_piece_bytes)
        self._traffic, self.barrier = calls.traffic, calls.barrier
        # Nothing below refers to this link: it is gone with its last user, also after a loss.
        self._derive_link = partial(_derive_link, calls)
        self.endpoint = Endpoint(
            MpiSurvivors(calls, self._derive_link),
            calls,
            calls.traffic,
            MpiCollectives(calls),
            partial(_allocate_window, calls),
            partial(self._derive_link, comm),
            partial(_free, comm),
        )

    def sendrecv(self, x: np.ndarray, dest: int, inbox: np.ndarray, source: int) -> None:
        """Send `x` and fill `inbox`, both at once."""
        calls, traffic = self._calls, self._traffic
        if type(x) is not traffic.unqueued_type or type(inbox) is not traffic.unqueued_type:
            return self._in_queues().sendrecv(x, dest, inbox, source)
        traffic.count(x.nbytes)
        entry, max_piece_bytes = calls.entry, calls.max_piece_bytes
        entry.enter(b"sendrecv", source, inbox.nbytes)
        try:
            if x.nbytes <= max_piece_bytes and inbox.nbytes <= max_piece_bytes:
                self._exchange_arrays(x, dest, inbox, source)
            else:
                self._exchange_in_pieces(x, dest, inbox, source)
        except MPI.Exception as error:
            raise calls.make_call_error("sendrecv", source, inbox.nbytes, error) from error
        except TimeoutError:
            raise calls.make_timeout("sendrecv", source, inbox.nbytes) from None
        entry.leave()

    def wait_any(self, requests: Sequence[Any]) -> int:
        """Return the index of one finished request; it needs no further `wait`."""
        if self._queues is not None:
            return self._queues.wait_any(requests)
        calls, status = self._calls, self._calls.status
        calls.entry.enter(b"wait_any", ALL_PEERS, 0)
        try:
            index = MPI.Request.Waitany([request.last_piece for request in requests], status)
        except MPI.Exception as error:
            raise calls.make_call_error("wait_any", ALL_PEERS, 0, error) from error
        calls.entry.leave()
        requests[index].wait(status.Get_count(MPI.BYTE))  # a call of its own in the record
        return index

    def split(self, color: int, key: int) -> MpiLink:
        """Return the link of the ranks of the same `color`, ordered by `key`; all must call."""
        with self._calls.recorded(b"split"):
            return self._derive_link(MPI.Intracomm(self._calls.comm.Split(color, key)))

    def create_group(self, ranks: Sequence[int], tag: int = 0) -> MpiLink:
        """Return the link of `ranks` of this link, in this order; these alone must call."""
        comm = self._calls.comm
        whole = comm.Get_group()
        group = whole.Incl(ranks)
        with self._calls.recorded(b"create_group"):
            link = self._derive_link(comm.Create_group(group, tag))
        group.Free()
        whole.Free()
        return link

    def message(self, x: Array) -> list[Spec]:
        """Return the MPI buffers of `x`, in pieces; only this method gives MPI GPU memory.

        MPI knows no streams: work of the current stream must finish before MPI reads the memory.
        """
        pieces = cut_pieces(x, self._calls.max_piece_bytes)
        if isinstance(x, np.ndarray):
            return [buffer_spec(piece) for piece in pieces]
        namespace(x).cuda.get_current_stream().synchronize()
        return [gpu_buffer_spec(piece.data.ptr, piece.nbytes) for piece in pieces]

    def post_send(self, message: Sequence[Spec], dest: int) -> MpiRequest:
        """Start to send a message."""
        pieces = [self._isend(piece, dest, TAG) for piece in message]
        return MpiRequest(self._calls, pieces, dest, 0, b"wait for isend")

    def post_receive(self, message: Sequence[Spec], source: int) -> MpiRequest:
        """Start to receive a message."""
        pieces = [self._irecv(piece, source, TAG) for piece in message]
        expected_bytes = sum(nbytes for _, nbytes, _ in message)
        return MpiRequest(self._calls, pieces, source, expected_bytes, b"wait for irecv")

    def _exchange_arrays(self, x: np.ndarray, dest: int, inbox: np.ndarray, source: int) -> None:
        calls, size = self._calls, inbox.nbytes
        status, pace = calls.status, calls.pace
        if pace is not None:
            pace = replace(pace)  # the link's has learned how fast segments arrive
            receive = self._irecv(buffer_spec(inbox), source, TAG)
            finish_piece(self._isend(buffer_spec(x), dest, TAG), status, pace)
            received_bytes = finish_piece(receive, status, pace)
        else:
            self._sendrecv(buffer_spec(x), dest, TAG, buffer_spec(inbox), source, TAG, status)
            received_bytes = status.Get_count(MPI.BYTE)
        if received_bytes != size:
            raise calls.make_call_error("sendrecv", source, size, f"{received_bytes} came")

    def _exchange_in_pieces(self, x: np.ndarray, dest: int, inbox: np.ndarray, source: int) -> None:
        empty = np.empty(0, np.uint8)
        pairs = zip_longest(
            cut_pieces(x, self._calls.max_piece_bytes),
            cut_pieces(inbox, self._calls.max_piece_bytes),
        )
        for outgoing, incoming in pairs:
            self._exchange_arrays(
                empty if outgoing is None else outgoing,
                MPI.PROC_NULL if outgoing is None else dest,
                empty if incoming is None else incoming,
                MPI.PROC_NULL if incoming is None else source,
            )


def _derive_link(calls: MpiCalls, comm: MPI.Intracomm, family: Family | None = None) -> MpiLink:
    """Return a link over `comm`, whose ranks are among ours, of our family or another."""
    traffic = calls.traffic
    link = MpiLink(comm, calls.entry, calls.max_piece_bytes, family or calls.family)
    link.endpoint.waits.pace = None if calls.pace is None else Pace()
    if traffic.paths:
        ranks = comm.group.Translate_ranks(list(range(comm.size)), calls.comm.group)
        thresholds = [traffic.path_thresholds[r] for r in ranks]
        link.endpoint.traffic.set_paths([traffic.paths[r] for r in ranks], thresholds)
    return link


def _allocate_window(calls: MpiCalls, nbytes: int) -> list[np.ndarray]:
    """Return all ranks' zeroed arrays, ours of `nbytes`, in a window that is never freed.

    To free the window would be collective, and no rank knows when the last array is gone. Returns
    no arrays if MPI refuses the window.
    """
    comm, entry = calls.comm, calls.entry
    entry.enter(b"window", ALL_PEERS, nbytes)
    try:
        window = MPI.Win.Allocate_shared(nbytes, 1, comm=comm)
    except MPI.Exception:
        entry.leave()
        return []
    pages = [window.Shared_query(rank)[0] for rank in range(comm.size)]
    arrays = [np.frombuffer(page, np.uint8) for page in pages]  # type: ignore[call-overload]
    arrays[comm.rank][:] = 0
    entry.leave()
    calls.barrier()
    return arrays


def _free(comm: MPI.Intracomm) -> None:
    """Give the communicator back to MPI."""
    if comm != MPI.COMM_NULL:  # a view may have freed it
        comm.Free()
