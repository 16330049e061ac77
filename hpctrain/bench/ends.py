"""Two ranks and the link between them, seen from any rank."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.tuning.measure import Line


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
