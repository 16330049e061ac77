"""Membership: the World of the ranks that are left, a new one after each loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from hpctrain.core.errors import LostRankError
from hpctrain.transport.link import Link
from hpctrain.transport.paths import RankPlace
from hpctrain.world.job import Job
from hpctrain.world.world import MADE_TOGETHER, World


class Membership:
    """A rank's place in a job that survives lost ranks, and its World, a new one after each loss.

    `init` returns it in such a job: it has every attribute of the present World. A spare sleeps in
    a World of its own; `rank` is then its number in the job, above the World's ranks.
    """

    __class__ = World  # type: ignore[assignment]  # to isinstance it is one, for users' scripts

    def __init__(self, job: Job, **facts: Any):
        """Make the first World, with `facts`; collective over the job."""
        self.job = job
        self.on_renewal: Callable[[], None] = lambda: None  #: called on each rank of the job
        self.world = World(job.group(job.peers), job.of_peers(job.places), membership=self, **facts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)

    def __repr__(self) -> str:
        return repr(self.world)

    @property
    def rank(self) -> int:
        return self.job.number if self.job.is_spare else self.world.rank

    @property
    def size(self) -> int:
        return len(self.job.members)

    def require(self, min_ranks: int, unit: int) -> None:
        """End the job at a loss that leaves fewer ranks; `unit` ranks hold a replica together."""
        self.job = replace(self.job, min_ranks=max(self.job.min_ranks, min_ranks), unit=unit)

    def __iter__(self) -> Iterator[World]:
        """Yield the World, and a new one each time that the caller comes back after a loss."""
        yield self.world
        while True:
            with suppress(LostRankError):
                self.renew()
                yield self.world

    def renew(self) -> None:
        """Make the World of the ranks that are left after a LostRankError; collective over them.

        Engines and sub-worlds of the earlier one must not be used any more. A sleeping spare keeps
        its World. Raises LostRankError if another rank is lost meanwhile, then call again, and
        RecoveryError if too few are left.
        """
        self.job.link.endpoint.survivors.revoke()
        self.world.link.endpoint.survivors.dissolve()
        self.job = job = self.job.without_lost()
        link = job.link_members()
        try:
            if link is not None:
                places = job.of_peers(job.places)
                self.world = replace(
                    self.world, link=link, places=places, bindings=(), main=MADE_TOGETHER
                )
            self.on_renewal()
        except LostRankError:
            if link is not None:
                link.endpoint.survivors.dissolve()
            raise


def make_world(link: Link, places: tuple[RankPlace, ...], job: Job | None, **facts: Any) -> World:
    """Return the World of the ranks of `link`, or the Membership of this rank in `job`; collective.

    A Membership serves as a World: it has every attribute of the present one.
    """
    return World(link, places, **facts) if job is None else cast(World, Membership(job, **facts))
