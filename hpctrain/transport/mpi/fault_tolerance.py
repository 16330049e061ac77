"""Lost ranks in MPI (ULFM): the errors that report a loss, and the end of all waits.

A rank that notices a loss revokes all communicators of its job at once. So every other rank leaves
its wait, whichever rank it waits for, and none needs to know whose loss it was.
Source: Bland, Bouteiller, Herault, Bosilca and Dongarra, "Post-failure recovery of MPI
communication capability: design and rationale", 2013.
"""

from __future__ import annotations

import os

from mpi4py import MPI

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
