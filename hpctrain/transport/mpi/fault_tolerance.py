"""Lost ranks in MPI (ULFM): the errors that report a loss, and the end of all waits.

A rank that notices a loss revokes all communicators of its job at once. So every other rank leaves
its wait, whichever rank it waits for, and none needs to know whose loss it was.
Source: Bland, Bouteiller, Herault, Bosilca and Dongarra, "Post-failure recovery of MPI
communication capability: design and rationale", 2013.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mpi4py import MPI

from hpctrain.core.errors import LostRankError, TransportError
from hpctrain.transport.pace import Pace
from hpctrain.watch import Entry

if TYPE_CHECKING:
    from hpctrain.transport.mpi.link import MpiLink

ALL_PEERS = -1  # the peer in the watch's record if a call waits for all ranks
FT_VARIABLE = "OMPI_MCA_mpi_ft_enable"
#: Errors of the caller. Any other may report a loss: Open MPI's collectives raise ERR_OTHER, too.
_CALLER_ERRORS = frozenset(
    (MPI.ERR_TRUNCATE, MPI.ERR_ARG, MPI.ERR_BUFFER, MPI.ERR_COUNT, MPI.ERR_RANK, MPI.ERR_TYPE)
)


def has_ulfm() -> bool:
    """Return whether the ranks of this job survive a loss (ULFM)."""
    # The functions exist without ULFM, too: Agree is then an all-reduce.
    return os.environ.get(FT_VARIABLE, "0") in ("1", "true")


class Family:
    """A communicator and all that were derived from it; revoked together."""

    def __init__(self, whole_job: bool = True):
        """`whole_job`: whether it has all ranks of the job; else others could not go on."""
        self.survives = whole_job and has_ulfm()
        self._comms: list[MPI.Comm] = []

    def add(self, comm: MPI.Comm) -> None:
        """Add a communicator, whose errors are returned from now on."""
        if self.survives:
            comm.Set_errhandler(MPI.ERRORS_RETURN)
            self._comms = [known for known in self._comms if known != MPI.COMM_NULL] + [comm]

    def revoke(self) -> None:
        """End every rank's waits on all communicators."""
        for comm in list(self._comms):
            if comm != MPI.COMM_NULL and not comm.Is_revoked():
                comm.Revoke()

    def reports_loss(self, error: object) -> bool:
        """Return whether `error` of a call may be due to a lost rank."""
        return (
            self.survives
            and isinstance(error, MPI.Exception)
            and error.Get_error_class() not in _CALLER_ERRORS
        )


def has_lost(comm: MPI.Comm) -> bool:
    """Return whether a rank of `comm` is known to be lost, or `comm` was revoked."""
    return comm.Is_revoked() or bool(failed_ranks(comm))


def failed_ranks(comm: MPI.Comm) -> list[int]:
    """Return the ranks of `comm` that are known to be lost."""
    failed = comm.Get_failed()
    if not failed.size:
        failed.Free()
        return []
    group = comm.Get_group()
    ranks = failed.Translate_ranks(list(range(failed.size)), group)
    group.Free()
    failed.Free()
    return list(ranks)


class SurvivingLink:
    """The errors of a link, and the calls with which the survivors of a lost rank go on."""

    comm: MPI.Intracomm
    entry: Entry
    family: Family
    rank: int
    pace: Pace | None
    derive_link: Callable[..., MpiLink]
    _is_dissolved = False  # no agreement of this communicator will succeed

    @property
    def survives(self) -> bool:
        """Whether survivors of a lost rank can go on."""
        return self.family.survives

    def agree(self) -> None:
        """Return on all ranks that are left, or raise LostRankError on all; see Link."""
        if not self._vote(1):
            raise self.make_loss("agree")

    def dissolve(self) -> None:
        """Make the pending agreement of the other ranks fail; see Link."""
        if not self._is_dissolved:
            self._vote(0)
            self._is_dissolved = True

    def _vote(self, vote: int) -> bool:
        """Return whether all ranks are left and have voted 1."""
        self.entry.enter(b"agree", ALL_PEERS, 0)
        try:
            self._is_dissolved = self.comm.Agree(vote) != 1
        except MPI.Exception:  # a rank was lost
            self._is_dissolved = True
        self.entry.leave()
        return not self._is_dissolved

    def revoke(self) -> None:
        """End every rank's waits on this link and on its whole family."""
        self.family.revoke()

    def lost_ranks(self) -> list[int]:
        """Return the ranks of this link that this rank knows to be lost."""
        MPI.COMM_SELF.Iprobe()  # MPI hears of losses while it makes progress
        return failed_ranks(self.comm)

    def shrink(self) -> tuple[MpiLink, list[int]]:
        """Return the link of the ranks that are left, of a family of its own; see Link."""
        self.entry.enter(b"shrink", ALL_PEERS, 0)
        comm = self.comm.Shrink()
        self.entry.leave()
        group, earlier_group = comm.Get_group(), self.comm.Get_group()
        ranks = group.Translate_ranks(list(range(group.size)), earlier_group)
        group.Free()
        earlier_group.Free()
        return self.derive_link(comm, Family()), list(ranks)

    def make_loss(self, call: str) -> LostRankError:
        """Return the error of a `call` that a lost rank ended; end all other waits of the job."""
        self.entry.leave()
        self.family.revoke()
        return LostRankError(f"rank {self.rank}: {call}: a rank was lost")

    @contextmanager
    def recorded(self, call: bytes) -> Iterator[None]:
        """Record a call of MPI that waits for all ranks; raise its errors as ours."""
        self.entry.enter(call, ALL_PEERS, 0)
        try:
            yield
        except MPI.Exception as error:
            raise self.make_call_error(call.decode(), ALL_PEERS, 0, error) from error
        self.entry.leave()

    def make_call_error(self, call: str, peer: int, size: int, actual: object) -> TransportError:
        """Return the error of a call; it no longer waits, since callers may catch the error."""
        self.entry.leave()
        if self.family.reports_loss(actual):
            return self.make_loss(f"{call} with {_name(peer)}")
        return TransportError(
            f"rank {self.rank}: {call} with {_name(peer)} expected {size} bytes, but: {actual}. "
            "All ranks must call with arrays of the same length and dtype, in the same order."
        )

    def make_timeout(self, call: str, peer: int, size: int) -> TransportError:
        """Return the error of a call that waited too long, with the calls of the node's ranks."""
        assert self.pace is not None  # else no wait has a limit
        report = self.entry.report_ranks(self.pace.limit_s)
        self.entry.leave()
        return TransportError(
            f"rank {self.rank}: Timed out after {self.pace.limit_s:g} s in {call} with "
            f"{_name(peer)}, {size} bytes\n{report}"
        )


def _name(peer: int) -> str:
    return "all ranks" if peer == ALL_PEERS else f"rank {peer}"
