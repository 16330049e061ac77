"""Two ranks and the link between them."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.tuning.measure import Line


@dataclass(frozen=True)
class RankPair:
    """A pair of ranks; `peer` is None on ranks outside of the pair."""

    link: Line
    source: int
    to: int
    path: str = "host"  #: of the messages

    @property
    def peer(self) -> int | None:
        return {self.source: self.to, self.to: self.source}.get(self.link.rank)
