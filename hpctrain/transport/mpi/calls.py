"""The calls of MPI that wait on a communicator: their pace, record in the watch, errors, survivors.

Its import does not start MPI; see startup.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402  (the settings above must come first)

from hpctrain.core.errors import LostRankError, TransportError  # noqa: E402
from hpctrain.transport.device import transfers  # noqa: E402
from hpctrain.transport.link import Link, Traffic  # noqa: E402
from hpctrain.transport.mpi.fault_tolerance import (  # noqa: E402
    ALL_PEERS,
    Family,
    failed_ranks,
    has_lost,
)
from hpctrain.transport.pace import WORDS, Pace  # noqa: E402
from hpctrain.watch import Entry  # noqa: E402

TAG = 0


class MpiCalls:
    """The calls of one thread on a communicator; see `hpctrain.transport.link.Waits`."""

    def __init__(self, comm: MPI.Intracomm, entry: Entry, family: Family, max_piece_bytes: int):
        self.comm, self.entry, self.family = comm, entry, family
        self.max_piece_bytes = max_piece_bytes
        self.traffic, self.status = Traffic(), MPI.Status()
        self.pace: Pace | None = None
        self._word_pace = WORDS  # of waits for words in shared memory
        self._rank = comm.rank
        family.add(comm)

    def barrier(self) -> None:
        """Return once every rank has called."""
        if self.traffic.paths or self.pace is not None:
            # Meanwhile pending messages are posted: others may wait for them.
            with self.recorded(b"barrier"):
                request = self.comm.Ibarrier()
            return self.wait_for(request.Test, b"barrier")
        entry = self.entry
        entry.enter(b"barrier", ALL_PEERS, 0)
        try:
            self.comm.Barrier()
        except MPI.Exception as error:
            raise self.make_call_error("barrier", ALL_PEERS, 0, error) from error
        entry.leave()

    def wait_for(
        self, condition: Callable[[], bool], call: bytes, peer: int = ALL_PEERS, nbytes: int = 0
    ) -> None:
        """Return once `condition()` holds; yields the core and drives MPI progress while waiting.

        The other rank may wait for a message that this rank's MPI has not sent yet.
        """
        condition = transfers.with_progress(condition, self.pace)
        self.entry.enter(call, peer, nbytes)
        try:
            self._word_pace.until(condition, self._make_progress)
        except TimeoutError:
            raise self.make_timeout(call.decode(), peer, nbytes) from None
        except MPI.Exception as error:
            raise self.make_call_error(call.decode(), peer, nbytes, error) from error
        self.entry.leave()

    def _make_progress(self) -> None:
        """Let MPI send what is pending; raise LostRankError, and MPI's errors."""
        self.comm.Iprobe(self._rank, TAG)
        if self.family.survives and has_lost(self.comm):
            raise self.make_loss("wait")

    def nap_after(self, spin_s: float, limit_s: float) -> None:
        """Wait by polling for `spin_s`, then with naps; after `limit_s` raise TransportError.

        For programs that share cores with processes of their own: where others compute, to yield
        the core takes milliseconds, while the kernel wakes a thread that has slept at once.
        """
        self.pace = self._word_pace = Pace(spin_s, limit_s)

    def interrupt_others(self) -> bool:
        """Return False: ranks are processes."""
        return False

    @contextmanager
    def recorded(self, call: bytes) -> Iterator[None]:
        """Record a call of MPI that waits for all ranks; raise its errors as ours."""
        self.entry.enter(call, ALL_PEERS, 0)
        try:
            yield
        except MPI.Exception as error:
            raise self.make_call_error(call.decode(), ALL_PEERS, 0, error) from error
        self.entry.leave()

    def make_loss(self, call: str) -> LostRankError:
        """Return the error of a `call` that a lost rank ended; end all other waits of the job."""
        self.entry.leave()
        self.family.revoke()
        return LostRankError(f"rank {self._rank}: {call}: a rank was lost")

    def make_call_error(self, call: str, peer: int, size: int, actual: object) -> TransportError:
        """Return the error of a call; it no longer waits, since callers may catch the error."""
        self.entry.leave()
        if self.family.reports_loss(actual):
            return self.make_loss(f"{call} with {_name(peer)}")
        return TransportError(
            f"rank {self._rank}: {call} with {_name(peer)} expected {size} bytes, but: {actual}. "
            "All ranks must call with arrays of the same length and dtype, in the same order."
        )

    def make_timeout(self, call: str, peer: int, size: int) -> TransportError:
        """Return the error of a call that waited too long, with the calls of the node's ranks."""
        assert self.pace is not None  # else no wait has a limit
        report = self.entry.report_ranks(self.pace.limit_s)
        self.entry.leave()
        return TransportError(
            f"rank {self._rank}: Timed out after {self.pace.limit_s:g} s in {call} with "
            f"{_name(peer)}, {size} bytes\n{report}"
        )


class MpiSurvivors:
    """The calls with which the survivors of a lost rank go on; see `link.Survivors`."""

    def __init__(self, calls: MpiCalls, derive_link: Callable[[MPI.Intracomm, Family], Link]):
        """`derive_link` makes the link over a communicator of the survivors."""
        self._calls, self._derive_link = calls, derive_link
        self._is_dissolved = False  # no agreement of this communicator will succeed

    @property
    def survives(self) -> bool:
        """Whether survivors of a lost rank can go on."""
        return self._calls.family.survives

    def agree(self) -> None:
        """Return on all ranks that are left, or raise LostRankError on all; see Survivors."""
        if not self._vote(1):
            raise self._calls.make_loss("agree")

    def dissolve(self) -> None:
        """Make the pending agreement of the other ranks fail; see Survivors."""
        if not self._is_dissolved:
            self._vote(0)
            self._is_dissolved = True

    def _vote(self, vote: int) -> bool:
        """Return whether all ranks are left and have voted 1."""
        entry = self._calls.entry
        entry.enter(b"agree", ALL_PEERS, 0)
        try:
            self._is_dissolved = self._calls.comm.Agree(vote) != 1
        except MPI.Exception:  # a rank was lost
            self._is_dissolved = True
        entry.leave()
        return not self._is_dissolved

    def revoke(self) -> None:
        """End every rank's waits on this link and on its whole family."""
        self._calls.family.revoke()

    def lost_ranks(self) -> list[int]:
        """Return the ranks of this link that this rank knows to be lost."""
        MPI.COMM_SELF.Iprobe()  # MPI hears of losses while it makes progress
        return failed_ranks(self._calls.comm)

    def shrink(self) -> tuple[Link, list[int]]:
        """Return the link of the ranks that are left, of a family of its own; see Survivors."""
        earlier_comm, entry = self._calls.comm, self._calls.entry
        entry.enter(b"shrink", ALL_PEERS, 0)
        comm = MPI.Intracomm(earlier_comm.Shrink())
        entry.leave()
        group, earlier_group = comm.Get_group(), earlier_comm.Get_group()
        ranks = group.Translate_ranks(list(range(group.size)), earlier_group)
        group.Free()
        earlier_group.Free()
        return self._derive_link(comm, Family()), list(ranks)


def calls_of(link: Link) -> MpiCalls:
    """Return the calls of a link over MPI."""
    return cast(MpiCalls, link.endpoint.waits)


def _name(peer: int) -> str:
    return "all ranks" if peer == ALL_PEERS else f"rank {peer}"
