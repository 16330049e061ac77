"""The GPUs of a tuning table: their model, the ranks on each, and the paths of messages."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.collectives.chunks import GPU_STREAM_SEGMENT_BYTES, STREAM_SEGMENT_BYTES
from hpctrain.transport.paths import RankPlace, Verdict, sends_by_pointer


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

    @property
    def stream_segment_bytes(self) -> int:
        """The length of segments between nodes: longer where MPI gets pointers of that length."""
        thresholds, long = self.verdict.by_size.get("across", ()), GPU_STREAM_SEGMENT_BYTES
        by_pointer = sends_by_pointer(self.verdict.across, thresholds, long)
        return long if by_pointer else STREAM_SEGMENT_BYTES

    @property
    def paths(self) -> str:
        """A description of the verdict."""
        verdict = self.verdict
        return (
            f"same GPU {verdict.same_gpu}, same node {verdict.same_node}, across {verdict.across}"
        )
