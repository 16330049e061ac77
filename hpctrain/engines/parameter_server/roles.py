"""Roles of ranks: workers compute gradients, servers keep parameters.

dedicated, 2 servers on 5 ranks     worker 0   worker 1   worker 2   server 0   server 1
colocated, 2 servers on 3 ranks     worker 0   worker 1   worker 2
                                               server 0   server 1      (threads)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.engines.options import EngineOptions
from hpctrain.transport.link import Link


class Roles(NamedTuple):
    """The ranks of the workers and of the servers, in ascending order."""

    workers: tuple[int, ...]
    servers: tuple[int, ...]

    def indexes(self, rank: int) -> tuple[int | None, int | None]:
        """Return the indexes of `rank` among the workers and the servers; None where it is none."""
        worker, server = (ranks.index(rank) if rank in ranks else None for ranks in self)
        return worker, server


class WorkerLinks(NamedTuple):
    """A server's links to the workers, and their ranks."""

    push: Link  #: reports and gradients arrive
    pull: Link  #: replies and parameters leave
    ranks: Sequence[int]


@config.options
class ServerOptions(EngineOptions):
    """Keys that all regimes with servers have."""

    servers: Annotated[int, Field(ge=1)] = 1
    placement: Literal["dedicated", "colocated"] = "dedicated"

    def workers(self, ranks: int) -> int:
        """Return the number of ranks that compute gradients."""
        workers = len(self.roles(ranks).workers)
        self.must_fit(workers)
        return workers

    def roles(self, size: int) -> Roles:
        """Return the roles of `size` ranks: the last ranks are servers.

        Raises UsageError for more servers than ranks, or if no rank would be a worker.
        """
        is_dedicated = self.placement == "dedicated"
        worker_count = size - self.servers * is_dedicated
        if worker_count < 1 or self.servers > size:
            min_ranks = self.servers + is_dedicated
            raise UsageError(
                f"[engine] servers = {self.servers} with placement '{self.placement}' needs at "
                f"least {min_ranks} ranks, seen {size}; start more, take fewer servers"
                + (' or set engine.placement = "colocated"' if is_dedicated else "")
            )
        return Roles(tuple(range(worker_count)), tuple(range(size - self.servers, size)))
