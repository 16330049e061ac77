"""Two ranks and the link between them, as `hpctrain bench p2p` measures them."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.tuning.measure import TimedLink


@dataclass(frozen=True)
class RankPair:
    """A pair of ranks; `peer` is None on all other ranks."""

    link: TimedLink
    source: int
    target: int
    path: str = "host"  #: taken by the messages

    @property
    def peer(self) -> int | None:
        return {self.source: self.target, self.target: self.source}.get(self.link.rank)
