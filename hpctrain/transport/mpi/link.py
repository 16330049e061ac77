"""The Link over MPI: bytes between ranks, on a communicator of our own.

Its import does not start MPI; see startup.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import mpi4py
import numpy as np

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402  (the settings above must come first)

from hpctrain.core.thresholds import Thresholds  # noqa: E402
from hpctrain.core.xp import Array, namespace  # noqa: E402
from hpctrain.transport.device import transfers  # noqa: E402
from hpctrain.transport.mpi import requests  # noqa: E402
from hpctrain.transport.mpi.fault_tolerance import ALL_PEERS, Family, SurvivingLink, has_lost  # noqa: E402
from hpctrain.transport.mpi.native import MpiCollectives  # noqa: E402
from hpctrain.transport.mpi.requests import buffer_spec, cut_pieces, finish_piece  # noqa: E402
from hpctrain.transport.pace import Pace  # noqa: E402
from hpctrain.transport.paths import Path  # noqa: E402
from hpctrain.watch import Entry  # noqa: E402

#: Open MPI refuses counts above 2^31 - 1; longer messages travel in pieces of this many bytes.
MAX_PIECE_BYTES = 1 << 30
TAG = 0
#: A rank that waits for a word in shared memory yields its core in a loop, and naps in the end.
YIELDING = Pace(spin_s=0.05, polls=32, yields=True, min_nap_s=0.5e-3, max_nap_s=0.5e-3)


class MpiLink(SurvivingLink, transfers.QueuedLink):
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
        self.entry = entry
        self.max_piece_bytes = max_piece_bytes
        self.pace: Pace | None = None  #: see Link
        self.word_pace = YIELDING  #: of waits for words in shared memory
        self.comm, self.family = comm, family or Family()
        self.family.add(comm)
        self.status = MPI.Status()

    def sendrecv(self, x: np.ndarray, dest: int, inbox: np.ndarray, source: int) -> None:
        """Send `x` and fill `inbox`, both at once."""
        if type(x) is not self.unqueued_type or type(inbox) is not self.unqueued_type:
            return transfers.queues_for(self).sendrecv(x, dest, inbox, source)
        self.count_message(x.nbytes)
        self.entry.enter(b"sendrecv", source, inbox.nbytes)
        try:
            if x.nbytes <= self.max_piece_bytes and inbox.nbytes <= self.max_piece_bytes:
                self._exchange_arrays(x, dest, inbox, source)
            else:
                self._exchange_in_pieces(x, dest, inbox, source)
        except MPI.Exception as error:
            raise self.make_call_error("sendrecv", source, inbox.nbytes, error) from error
        except TimeoutError:
            raise self.make_timeout("sendrecv", source, inbox.nbytes) from None
        self.entry.leave()

    def wait_any(self, requests: Sequence[Any]) -> int:
        """Return the index of one finished request; it needs no further `wait`."""
        if self.queues is not None:
            return self.queues.wait_any(requests)
        self.entry.enter(b"wait_any", ALL_PEERS, 0)
        try:
            index = MPI.Request.Waitany([request.last_piece for request in requests], self.status)
        except MPI.Exception as error:
            raise self.make_call_error("wait_any", ALL_PEERS, 0, error) from error
        self.entry.leave()
        requests[index].wait(self.status.Get_count(MPI.BYTE))  # a call of its own in the record
        return index

    def split(self, color: int, key: int) -> MpiLink:
        """Return the link of the ranks of the same `color`, ordered by `key`; all must call."""
        with self.recorded(b"split"):
            return self.derive_link(MPI.Intracomm(self.comm.Split(color, key)))

    def create_group(self, ranks: Sequence[int], tag: int = 0) -> MpiLink:
        """Return the link of `ranks` of this link, in this order; these alone must call."""
        whole = self.comm.Get_group()
        group = whole.Incl(ranks)
        with self.recorded(b"create_group"):
            link = self.derive_link(self.comm.Create_group(group, tag))
        group.Free()
        whole.Free()
        return link

    def view(self) -> MpiLink:
        """Return this link for a second thread: of the two, one may only send, one only receive."""
        return self.derive_link(self.comm)

    def set_paths(self, paths: Sequence[Path], path_thresholds: Sequence[Thresholds] = ()) -> None:
        """Give GPU arrays to MPI only if `paths` allow it; see Link; all must call."""
        self.paths, self.unqueued_type = tuple(paths), None
        self.path_thresholds = tuple(path_thresholds) or ((),) * len(self.paths)

    def barrier(self) -> None:
        """Return once every rank has called."""
        if self.paths or self.pace is not None:
            # Meanwhile pending messages are posted: others may wait for them.
            with self.recorded(b"barrier"):
                request = self.comm.Ibarrier()
            return self.wait_for(request.Test, b"barrier")
        self.entry.enter(b"barrier", ALL_PEERS, 0)
        try:
            self.comm.Barrier()
        except MPI.Exception as error:
            raise self.make_call_error("barrier", ALL_PEERS, 0, error) from error
        self.entry.leave()

    def wait_for(
        self, condition: Callable[[], bool], call: bytes, peer: int = ALL_PEERS, nbytes: int = 0
    ) -> None:
        """Return once `condition()` holds; yields the core and drives MPI progress while waiting.

        The other rank may wait for a message that this rank's MPI has not sent yet.
        """
        condition = transfers.with_progress(condition, self.pace)
        self.entry.enter(call, peer, nbytes)
        try:
            self.word_pace.until(condition, self._make_progress)
        except TimeoutError:
            raise self.make_timeout(call.decode(), peer, nbytes) from None
        except MPI.Exception as error:
            raise self.make_call_error(call.decode(), peer, nbytes, error) from error
        self.entry.leave()

    def _make_progress(self) -> None:
        """Let MPI send what is pending; raise LostRankError, and MPI's errors."""
        self.comm.Iprobe(self.rank, TAG)
        if self.family.survives and has_lost(self.comm):
            raise self.make_loss("wait")

    def window(self, nbytes: int) -> list[np.ndarray]:
        """Return all ranks' zeroed arrays, ours of `nbytes`, in a window that is never freed.

        To free the window would be collective, and no rank knows when the last array is gone.
        Returns no arrays if MPI refuses the window.
        """
        self.entry.enter(b"window", ALL_PEERS, nbytes)
        try:
            window = MPI.Win.Allocate_shared(nbytes, 1, comm=self.comm)
        except MPI.Exception:
            self.entry.leave()
            return []
        pages = [window.Shared_query(rank)[0] for rank in range(self.size)]
        arrays = [np.frombuffer(page, np.uint8) for page in pages]  # type: ignore[call-overload]
        arrays[self.rank][:] = 0
        self.entry.leave()
        self.barrier()
        return arrays

    @property
    def native(self) -> MpiCollectives:
        """MPI's own collectives on these ranks."""
        return MpiCollectives(self.comm, self)

    def nap_after(self, spin_s: float, limit_s: float) -> None:
        """Wait by polling for `spin_s`, then with naps; after `limit_s` raise TransportError.

        For programs that share cores with processes of their own: where others compute, to yield
        the core takes milliseconds, while the kernel wakes a thread that has slept at once.
        """
        self.pace = self.word_pace = Pace(spin_s, limit_s)

    def record_waits_in(self, entry: Entry) -> None:
        """Record waiting calls in the watch's `entry` from now on."""
        self.entry = entry

    def interrupt_others(self) -> bool:
        """Return False: ranks are processes."""
        return False

    def free(self) -> None:
        """Give the communicator back to MPI; all its ranks must call, and none may use it after."""
        if self.comm != MPI.COMM_NULL:  # a view may have freed it
            self.comm.Free()

    def message(self, x: Array) -> list[requests.Spec]:
        """Return the MPI buffers of `x`, in pieces; only this method gives MPI GPU memory.

        MPI knows no streams: work of the current stream must finish before MPI reads the memory.
        """
        pieces = cut_pieces(x, self.max_piece_bytes)
        if isinstance(x, np.ndarray):
            return [buffer_spec(piece) for piece in pieces]
        namespace(x).cuda.get_current_stream().synchronize()
        return [requests.gpu_buffer_spec(piece.data.ptr, piece.nbytes) for piece in pieces]

    def post_send(self, message: Sequence[requests.Spec], dest: int) -> requests.MpiRequest:
        """Start to send a message."""
        pieces = [self.comm.Isend(piece, dest, TAG) for piece in message]
        return requests.MpiRequest(self, pieces, dest, 0, b"wait for isend")

    def post_receive(self, message: Sequence[requests.Spec], source: int) -> requests.MpiRequest:
        """Start to receive a message."""
        pieces = [self.comm.Irecv(piece, source, TAG) for piece in message]
        expected_bytes = sum(nbytes for _, nbytes, _ in message)
        return requests.MpiRequest(self, pieces, source, expected_bytes, b"wait for irecv")

    def derive_link(self, comm: MPI.Intracomm, family: Family | None = None) -> MpiLink:
        """Return a link over `comm` whose ranks are among ours, of our family or another."""
        link = MpiLink(comm, self.entry, self.max_piece_bytes, family or self.family)
        link.pace = None if self.pace is None else Pace()
        if self.paths:
            ranks = comm.group.Translate_ranks(list(range(comm.size)), self.comm.group)
            link.set_paths([self.paths[r] for r in ranks], [self.path_thresholds[r] for r in ranks])
        return link

    def _exchange_arrays(self, x: np.ndarray, dest: int, inbox: np.ndarray, source: int) -> None:
        status, size = self.status, inbox.nbytes
        if self.pace is not None:
            pace = replace(self.pace)  # the link's has learned how fast segments arrive
            receive = self.comm.Irecv(buffer_spec(inbox), source, TAG)
            finish_piece(self.comm.Isend(buffer_spec(x), dest, TAG), status, pace)
            received_bytes = finish_piece(receive, status, pace)
        else:
            self.comm.Sendrecv(buffer_spec(x), dest, TAG, buffer_spec(inbox), source, TAG, status)
            received_bytes = status.Get_count(MPI.BYTE)
        if received_bytes != size:
            raise self.make_call_error("sendrecv", source, size, f"{received_bytes} came")

    def _exchange_in_pieces(self, x: np.ndarray, dest: int, inbox: np.ndarray, source: int) -> None:
        empty = np.empty(0, np.uint8)
        pairs = zip_longest(
            cut_pieces(x, self.max_piece_bytes), cut_pieces(inbox, self.max_piece_bytes)
        )
        for outgoing, incoming in pairs:
            self._exchange_arrays(
                empty if outgoing is None else outgoing,
                MPI.PROC_NULL if outgoing is None else dest,
                empty if incoming is None else incoming,
                MPI.PROC_NULL if incoming is None else source,
            )
