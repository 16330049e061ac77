"""Two ranks and the link between them, seen from any rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from hpctrain.transport.link import Request


class Line(Protocol):
    """What is timed of a link, or of what stands for one."""

    rank: int

    def isend(self, x: Any, to: int) -> Request:
        """Start to send `x` to rank `to`."""

    def irecv(self, x: Any, source: int) -> Request:
        """Start to fill `x` from rank `source`."""


@dataclass(frozen=True)
class Ends:
    """Two ranks, seen from any: `peer` is None where this rank looks on."""

    link: Line
    source: int
    to: int
    path: str = "host"  #: which way messages take

    @property
    def peer(self) -> int | None:
        return {self.source: self.to, self.to: self.source}.get(self.link.rank)
