"""The Link over MPI: bytes between ranks, on a communicator of our own.

MPI is started here and nowhere else, late and by hand (`start`), so that cores, BLAS threads and
devices are set before MPI_Init reads them, and so that `import hpctrain` costs nothing.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import mpi4py
import numpy as np

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402  (the settings above must come first)

from hpctrain.core.errors import TransportError  # noqa: E402
from hpctrain.core.thresholds import Thresholds  # noqa: E402
from hpctrain.core.xp import Array, namespace  # noqa: E402
from hpctrain.transport.device import transfers  # noqa: E402
from hpctrain.transport.link import Request  # noqa: E402
from hpctrain.transport.mpi import requests  # noqa: E402
from hpctrain.transport.mpi.native import MpiCollectives  # noqa: E402
from hpctrain.transport.mpi.requests import MpiRequest, Spec, cuts, finish, spec, spec_of_gpu  # noqa: E402
from hpctrain.transport.paths import Path  # noqa: E402
from hpctrain.watch import Entry  # noqa: E402

#: Open MPI refuses counts above 2^31 - 1; longer messages travel in pieces of this many bytes.
CUT_BYTES = 1 << 30
TAG = 0
#: A rank that waits for a word in shared memory first yields its core in a loop; after YIELD_S it
#: sleeps between polls: a nap is 1/100 of the time waited by then.
YIELD_S, NAP_S, POLLS_PER_PROBE = 0.05, 0.0005, 32
ALL_PEERS = -1  # the peer, in the watch's record, of a call that waits for every rank


class MpiLink:
    """One rank's view of a communicator; see `hpctrain.transport.link.Link`."""

    def __init__(self, comm: MPI.Comm, entry: Entry, cut_bytes: int = CUT_BYTES):
        """Take over `comm` for exclusive use; `entry` is this thread's watch record."""
        self.rank, self.size = comm.rank, comm.size
        self.bytes_sent = self.messages_sent = self.host_bytes = 0
        self.entry = entry
        self.cut_bytes = cut_bytes
        self.sleeps_while_waiting, self.sleeping_wait = False, requests.SleepingWait()
        #: of arrays that need no queue; None: all types do, see device/transfers.py
        self.unqueued_type: type | None = np.ndarray
        self.paths: tuple[Path, ...] = ()  #: to each rank; none where no rank has a GPU
        self.path_thresholds: tuple[Thresholds, ...] = ()
        self.queues: transfers.TransferQueues | None = None
        self._comm = comm
        self.status = MPI.Status()

    def isend(self, x: np.ndarray, dest: int) -> Request:
        """Start to send `x` to rank `dest`."""
        if type(x) is not self.unqueued_type:
            return transfers.queues_for(self).isend(x, dest)
        self.count_message(x.nbytes)
        return self.post_send([spec(piece) for piece in cuts(x, self.cut_bytes)], dest)

    def irecv(self, x: np.ndarray, source: int) -> Request:
        """Start to fill `x` from rank `source`."""
        if type(x) is not self.unqueued_type:
            return transfers.queues_for(self).irecv(x, source)
        return self.post_receive([spec(piece) for piece in cuts(x, self.cut_bytes)], source)

    def sendrecv(self, x: np.ndarray, dest: int, inbox: np.ndarray, source: int) -> None:
        """Send `x` and fill `inbox`, both at once."""
        if type(x) is not self.unqueued_type or type(inbox) is not self.unqueued_type:
            return transfers.queues_for(self).sendrecv(x, dest, inbox, source)
        self.count_message(x.nbytes)
        self.entry.enter(b"sendrecv", source, inbox.nbytes)
        try:
            if x.nbytes <= self.cut_bytes and inbox.nbytes <= self.cut_bytes:
                self._exchange(x, dest, inbox, source)
            else:
                self._exchange_in_pieces(x, dest, inbox, source)
        except MPI.Exception as error:
            raise self.failure("sendrecv", source, inbox.nbytes, error) from error
        self.entry.leave()

    def wait_any(self, requests: Sequence[Any]) -> int:
        """Return the index of one finished request, which needs no further `wait`."""
        if self.queues is not None:
            return self.queues.wait_any(requests)
        self.entry.enter(b"wait_any", ALL_PEERS, 0)
        index = MPI.Request.Waitany([request.last for request in requests], self.status)
        requests[index].wait(self.status.Get_count(MPI.BYTE))
        self.entry.leave()
        return index

    def split(self, color: int, key: int) -> MpiLink:
        """Return the link of the ranks of the same `color`, ordered by `key`; all must call."""
        self.entry.enter(b"split", ALL_PEERS, 0)
        link = self._like(self._comm.Split(color, key))
        self.entry.leave()
        return link

    def view(self) -> MpiLink:
        """Return this link for a second thread: of the two, one may only send, one only receive."""
        return self._like(self._comm)

    def set_paths(self, paths: Sequence[Path], path_thresholds: Sequence[Thresholds] = ()) -> None:
        """Give GPUs' arrays to MPI only where `paths` allow it; see Link; all must call."""
        self.paths, self.unqueued_type = tuple(paths), None
        self.path_thresholds = tuple(path_thresholds) or ((),) * len(self.paths)

    def barrier(self) -> None:
        """Return once every rank has called."""
        if self.paths:
            return self._barrier_of_gpus()
        self.entry.enter(b"barrier", ALL_PEERS, 0)
        self._comm.Barrier()
        self.entry.leave()

    def wait_for(
        self, condition: Callable[[], bool], call: bytes, peer: int = ALL_PEERS, nbytes: int = 0
    ) -> None:
        """Return once `condition()`; yields the core and drives MPI progress while waiting.

        The other rank may itself wait for a message of ours that MPI has not sent yet.
        """
        condition = transfers.with_progress(condition, self.sleeps_while_waiting)
        self.entry.enter(call, peer, nbytes)
        nap_at, polls = time.monotonic() + YIELD_S, 0
        while not condition():
            os.sched_yield()
            polls += 1
            if polls % POLLS_PER_PROBE == 0:
                self._comm.Iprobe(self.rank, TAG)
                if time.monotonic() > nap_at:
                    time.sleep(NAP_S)
        self.entry.leave()

    def window(self, nbytes: int) -> list[np.ndarray]:
        """Return all ranks' arrays of zeros, ours of `nbytes`, in a window that lives to the end.

        Freeing it would be collective, and no rank knows when the last array in it is gone. Returns
        no arrays where MPI refuses.
        """
        self.entry.enter(b"window", ALL_PEERS, nbytes)
        try:
            window = MPI.Win.Allocate_shared(nbytes, 1, comm=MPI.Intracomm(self._comm))
        except MPI.Exception:
            self.entry.leave()
            return []
        pages = [window.Shared_query(rank)[0] for rank in range(self.size)]
        arrays = [np.frombuffer(page, np.uint8) for page in pages]  # type: ignore[call-overload]
        arrays[self.rank][:] = 0
        self._comm.Barrier()
        self.entry.leave()
        return arrays

    @property
    def native(self) -> MpiCollectives:
        """MPI's own collectives on these ranks."""
        return MpiCollectives(self._comm, self)

    def record_waits_in(self, entry: Entry) -> None:
        """From now on record the calls that wait in the watch's `entry`."""
        self.entry = entry

    def interrupt_others(self) -> bool:
        """Return False: ranks are processes."""
        return False

    def free(self) -> None:
        """Give the communicator back to MPI; all its ranks must call, and none may use it after."""
        if self._comm != MPI.COMM_NULL:  # freed by way of a view
            self._comm.Free()

    def count_message(self, nbytes: int) -> None:
        """Count a message of `nbytes`."""
        self.bytes_sent += nbytes
        self.messages_sent += 1

    def message(self, x: Array) -> list[Spec]:
        """Return the MPI buffers of `x`, in pieces: the one place that gives MPI GPU memory.

        MPI knows no streams: work in the current one must finish before MPI reads the memory.
        """
        if isinstance(x, np.ndarray):
            return [spec(piece) for piece in cuts(x, self.cut_bytes)]
        namespace(x).cuda.get_current_stream().synchronize()
        return [spec_of_gpu(piece.data.ptr, piece.nbytes) for piece in cuts(x, self.cut_bytes)]

    def post_send(self, message: Sequence[Spec], dest: int) -> MpiRequest:
        """Start to send a message."""
        pieces = [self._comm.Isend(piece, dest, TAG) for piece in message]
        return MpiRequest(self, pieces, dest, 0, b"wait for isend")

    def post_receive(self, message: Sequence[Spec], source: int) -> MpiRequest:
        """Start to receive a message."""
        pieces = [self._comm.Irecv(piece, source, TAG) for piece in message]
        return MpiRequest(self, pieces, source, sum(p[1] for p in message), b"wait for irecv")

    def _like(self, comm: MPI.Comm) -> MpiLink:
        """Return a link over `comm` whose ranks are among ours."""
        link = MpiLink(comm, self.entry, self.cut_bytes)
        link.sleeps_while_waiting = self.sleeps_while_waiting
        if self.paths:
            ranks = comm.group.Translate_ranks(list(range(comm.size)), self._comm.group)
            link.set_paths([self.paths[r] for r in ranks], [self.path_thresholds[r] for r in ranks])
        return link

    def _barrier_of_gpus(self) -> None:
        """Wait for all ranks, and post pending messages meanwhile, for which others may wait."""
        request = self._comm.Ibarrier()
        self.wait_for(request.Test, b"barrier")

    def _exchange(self, x: np.ndarray, dest: int, inbox: np.ndarray, source: int) -> None:
        status, size = self.status, inbox.nbytes
        if self.sleeps_while_waiting:
            sleeping_wait = requests.SleepingWait()  # waits for segments do not predict an exchange
            receive = self._comm.Irecv(spec(inbox), source, TAG)
            finish(self._comm.Isend(spec(x), dest, TAG), status, sleeping_wait)
            received_bytes = finish(receive, status, sleeping_wait)
        else:
            self._comm.Sendrecv(spec(x), dest, TAG, spec(inbox), source, TAG, status)
            received_bytes = status.Get_count(MPI.BYTE)
        if received_bytes != size:
            raise self.failure("sendrecv", source, size, f"{received_bytes} came")

    def _exchange_in_pieces(self, x: np.ndarray, dest: int, inbox: np.ndarray, source: int) -> None:
        empty = np.empty(0, np.uint8)
        pairs = zip_longest(cuts(x, self.cut_bytes), cuts(inbox, self.cut_bytes))
        for outgoing, incoming in pairs:
            self._exchange(
                empty if outgoing is None else outgoing,
                MPI.PROC_NULL if outgoing is None else dest,
                empty if incoming is None else incoming,
                MPI.PROC_NULL if incoming is None else source,
            )

    def failure(self, call: str, peer: int, size: int, actual: object) -> TransportError:
        self.entry.leave()  # no longer waiting: a caller that catches this may go on
        return TransportError(
            f"rank {self.rank}: {call} with rank {peer} expected {size} bytes, but: {actual}. "
            "All ranks must call with arrays of the same length and dtype, in the same order."
        )


def start(entry: Entry, timeout_s: float) -> MpiLink:
    """Start MPI with THREAD_MULTIPLE unless it is running, and return a link to all ranks.

    If a rank never comes, the others exit after `timeout_s` with their stacks and exit code 1.
    """
    if not MPI.Is_initialized():
        # mpi4py holds the interpreter's lock in MPI_Init, so no Python thread could time it.
        faulthandler.dump_traceback_later(timeout_s, exit=True)
        with warnings.catch_warnings():
            # Of a foreign launcher; `hpctrain.init` warns of it once, with a remedy.
            warnings.filterwarnings("ignore", "suspicious MPI", RuntimeWarning)
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        faulthandler.cancel_dump_traceback_later()
    return MpiLink(MPI.COMM_WORLD.Dup(), entry)


def concurrent() -> bool:
    """Return whether MPI lets several threads call it at once."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def running() -> bool:
    """Return whether MPI was started and not yet ended."""
    return MPI.Is_initialized() and not MPI.Is_finalized()


def finalize() -> None:
    """End MPI after a barrier, so that no launcher takes a rank that exits early for lost."""
    if running():
        MPI.COMM_WORLD.Barrier()
        MPI.Finalize()


def abort(code: int, grace_s: float = 2.0) -> None:
    """End the whole job with exit code `code`, even while another thread is inside MPI.

    MPI_Abort may wait for a lock that this other thread holds: then this process exits alone
    after `grace_s` seconds, and the launcher ends the rest.
    """
    if running():
        threading.Thread(target=MPI.COMM_WORLD.Abort, args=(code,), daemon=True).start()
        time.sleep(grace_s)
    os._exit(code)
