"""The tables `[mesh]` and `[pipeline]`: how ranks share a model, and the order of their actions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.core.names import counted
from hpctrain.parallel.schedules import SCHEDULES, make

Positive = Annotated[int, Field(ge=1)]
PLANNED_AXES = ("tensor", "sequence", "expert")


@config.options
class MeshOptions:
    """The ranks along each axis of the mesh; the data axis has the ranks that are left."""

    pipe: Positive = 1  #: ranks that together hold one replica, each some layers
    tensor: Positive = 1
    sequence: Positive = 1
    expert: Positive = 1

    def __post_init__(self) -> None:
        """Refuse the axes that do not exist yet."""
        for axis in PLANNED_AXES:
            if getattr(self, axis) > 1:
                raise UsageError(
                    f"[mesh] {axis}: expected 1, seen {getattr(self, axis)}; this version splits "
                    "models along pipe alone"
                )

    def workers(self, ranks: int) -> int:
        """Return the ranks along the data axis of `ranks`; raise UsageError if they do not fit."""
        if ranks % self.pipe:
            fewer = ranks // self.pipe * self.pipe
            choices = [str(n) for n in (fewer, fewer + self.pipe) if n]
            divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
            closest_divisors = sorted(divisors, key=lambda n: (abs(n - self.pipe), n))[:2]
            raise UsageError(
                f"[mesh] pipe: expected a divisor of {counted(ranks, 'rank')}, seen {self.pipe}; "
                f"start {' or '.join(choices)} ranks, "
                f"or set pipe = {' or '.join(map(str, sorted(closest_divisors)))}"
            )
        return ranks // self.pipe


@config.options
class PipelineOptions:
    """The schedule of a pipeline, and the layers of each stage."""

    schedule: str = "1f1b"  #: of hpctrain.parallel.schedules
    #: "measured": the cut with the fastest slowest stage, by the times of the layers on rank 0;
    #: "even": equal numbers of parameters; or the number of layers of each stage
    balance: Literal["measured", "even"] | list[Positive] = "measured"
    stages_per_rank: Positive | None = None  #: None: as many as the schedule usually has

    def __post_init__(self) -> None:
        """Raise UsageError for an unknown schedule."""
        config.pick(SCHEDULES, self.schedule, "[pipeline] schedule")

    def check(self, ranks: int, micro_batches: int) -> None:
        """Raise UsageError if the schedule does not take these numbers."""
        if ranks > 1:
            from hpctrain.parallel.schedules.check import check  # most runs have no pipeline

            check(make(self.schedule, ranks, micro_batches, self.stages_per_rank))
