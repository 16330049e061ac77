"""The ranks of a job that survives lost ranks: members of the World, and spares that sleep.

number in the job      0   1   2   3 | 4   5      numbers 1 and 4 are lost
rank of the World      0   1   2   3 |            4 and 5 are spares
after the loss         0       2   3 |     1      spare 5 takes the place of rank 1
without any spare      0       1   2              the ranks behind move up
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from hpctrain.core.errors import LostRankError, RecoveryError, UsageError
from hpctrain.core.launchers import MIN_RANKS, SPARES
from hpctrain.core.names import counted
from hpctrain.transport.link import Link, wait_all
from hpctrain.transport.pace import SPARE, Pace
from hpctrain.transport.paths import RankPlace

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """All ranks that are left; a rank's number is its rank at the start of the job."""

    link: Link  #: to every rank of the job
    number: int  #: of this rank
    numbers: tuple[int, ...]  #: of the ranks of `link`
    members: tuple[int, ...]  #: of the ranks of the World
    places: tuple[RankPlace, ...]  #: by number
    min_ranks: int = 1  #: with fewer the job ends
    unit: int = 1  #: ranks per replica; left-over ranks become spares

    @classmethod
    def of_ranks(
        cls, link: Link, places: tuple[RankPlace, ...], spares: int = 0, min_ranks: int = 1
    ) -> Job:
        """Return the job of the ranks of `link`; the last `spares` ranks sleep."""
        numbers = tuple(range(link.size))
        members = numbers[: link.size - spares]
        return cls(link, link.rank, numbers, members, places, min_ranks)

    @property
    def peers(self) -> tuple[int, ...]:
        """The numbers of the ranks of this rank's World, of this rank alone if it is a spare."""
        return (self.number,) if self.is_spare else self.members

    def of_peers(self, facts: Sequence[T]) -> tuple[T, ...]:
        """Select the entries of `facts`, one per rank, that belong to `peers`; () stays empty."""
        return tuple(facts[number] for number in self.peers) if facts else ()

    @property
    def hosts(self) -> list[str]:
        """The node of each rank of `link`."""
        return [self.places[number].node for number in self.numbers]

    @property
    def is_spare(self) -> bool:
        """Whether this rank waits for a place in the World."""
        return self.number not in self.members

    @property
    def spares(self) -> list[int]:
        """The numbers of the spares that are left."""
        return [number for number in self.numbers if number not in self.members]

    def group(self, numbers: Sequence[int]) -> Link:
        """Create the link of the ranks with these numbers; only they must call."""
        return self.link.create_group([self.numbers.index(number) for number in numbers])

    def without_lost(self) -> Job:
        """Return the job of the ranks that are left, which all must call."""
        link, ranks = self.link.endpoint.survivors.shrink()
        numbers = tuple(self.numbers[rank] for rank in ranks)
        members = fill_places(self.members, numbers, self.unit)
        job = replace(self, link=link, numbers=numbers, members=members)
        link.endpoint.waits.pace = Pace() if job.is_spare else None  # the others need the cores
        return job

    def link_members(self) -> Link | None:
        """Return the link of the World's ranks, None on a spare; all ranks of the job must call.

        Raises, on all ranks alike, LostRankError if another rank is lost meanwhile, and
        RecoveryError if too few are left.
        """
        if len(self.members) < self.min_ranks or not self.members:
            raise RecoveryError(
                f"{counted(len(self.numbers), 'rank')} left, but training needs "
                f"{max(self.min_ranks, self.unit)} "
                "([elastic] min_ranks, --min-ranks); start the job again with --resume"
            )
        if self.members == self.numbers:
            return self.link
        survivors = self.link.endpoint.survivors
        try:
            link = None if self.is_spare else self.group(self.members)
            survivors.agree()  # no rank may wait in a group that another does not have
        except LostRankError:
            survivors.dissolve()
            raise
        return link

    def await_note(self) -> bytes:
        """Sleep as a spare until the World's first rank sends a note, and return it.

        Raises LostRankError once a rank of the job is lost.
        """
        source, length = self.numbers.index(self.members[0]), np.zeros(1, np.int64)
        request = self.link.irecv(length, source)
        SPARE.until(request.done)
        note = np.zeros(int(length[0]), np.uint8)
        self.link.irecv(note, source).wait()
        return note.tobytes()

    @property
    def has_lost_ranks(self) -> bool:
        """Whether a rank was lost, as far as this one knows."""
        return len(self.numbers) < len(self.places) or bool(
            self.link.endpoint.survivors.lost_ranks()
        )

    def dismiss_spares(self, note: bytes) -> None:
        """Send all spares a note, from the World's first rank."""
        if self.number != self.members[0]:
            return
        data, lost = np.frombuffer(note, np.uint8), self.link.endpoint.survivors.lost_ranks()
        ranks = [self.numbers.index(number) for number in self.spares]
        # All are sent before one is waited for: a spare that is lost now revokes the link.
        requests = [
            self.link.isend(x, rank)
            for rank in ranks
            if rank not in lost
            for x in (np.array([data.size]), data)
        ]
        wait_all(requests)


def fill_places(members: Sequence[int], numbers: Sequence[int], unit: int = 1) -> tuple[int, ...]:
    """Return the members after a loss, among the surviving `numbers`; spares fill lost places.

    Where spares are too few, the members behind move up, and a multiple of `unit` remains.
    """
    spares = iter([number for number in numbers if number not in members])
    places = (number if number in numbers else next(spares, None) for number in members)
    filled_numbers = [number for number in places if number is not None]
    return tuple(filled_numbers[: len(filled_numbers) // unit * unit])


def spares_requested(environ: Mapping[str, str], size: int) -> int:
    """Return the number of the last ranks of a job of `size` that are spares; raise UsageError."""
    return _count(environ, SPARES, size - 1)


def min_ranks_requested(environ: Mapping[str, str], size: int) -> int:
    """Return the number of ranks with which training still goes on; raise UsageError."""
    return max(_count(environ, MIN_RANKS, size), 1)


def _count(environ: Mapping[str, str], name: str, limit: int) -> int:
    text = environ.get(name, "0")
    if not text.isdecimal() or int(text) > limit:
        raise UsageError(f"{name}: expected a number from 0 to {limit}, seen '{text}'")
    return int(text)
