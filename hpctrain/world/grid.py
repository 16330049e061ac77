"""The grid of a mesh, as one rank has it: the groups beyond the ranks with the same layers."""

from __future__ import annotations

from typing import NamedTuple

from hpctrain.collectives import Group
from hpctrain.transport.link import Link


class Grid(NamedTuple):
    """The groups of a rank in a mesh; its World has the ranks with the same part of the model."""

    pipe: Group  #: the ranks that together hold one replica, in the order of the pipe axis
    stages: Link  #: of the same ranks, for the messages between stages alone
    norms: Link  #: of the same ranks, for the thread that updates parameters alone

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent along the pipe axis."""
        links = (*self.pipe.links, self.stages, self.norms)
        return sum(link.endpoint.traffic.bytes_sent for link in links)
