"""The GPUs of a tuning table: their model, the ranks on each, and the paths of messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.transport.paths import RankPlace, Verdict


@dataclass(frozen=True)
class GpuLayout:
    """The GPUs of a group in which every rank has one."""

    model: str  #: of rank 0's
    places: tuple[RankPlace, ...]
    verdict: Verdict
    is_mapped: bool  #: whether neighbours may map each other's arrays by CUDA IPC

    @property
    def ranks_by_gpu(self) -> list[list[int]]:
        """The ranks on each GPU, in the order of first ranks."""
        ranks_by_place: dict[RankPlace, list[int]] = {}
        for rank, place in enumerate(self.places):
            ranks_by_place.setdefault(place, []).append(rank)
        return list(ranks_by_place.values())

    def share_one_gpu(self, node: Sequence[int]) -> bool:
        """Return whether the ranks of `node` share one GPU."""
        return len({self.places[rank] for rank in node}) == 1

    @property
    def paths(self) -> str:
        """The verdict in words."""
        verdict = self.verdict
        return (
            f"same GPU {verdict.same_gpu}, same node {verdict.same_node}, across {verdict.across}"
        )
