"""Pipeline schedules: the actions of each rank, in order.

A model is cut into S contiguous *stages*, a batch into M *micro-batches*. An action is one
operation of a stage on a micro-batch:

    F   forward                             needs F of the stage before
    B   backward: I and W in one            needs F, and I or B of the next stage
    I   gradient of the stage's input       needs the same
    W   gradient of the stage's parameters  needs I of the same stage

I alone holds up the stage before, so W may be put off into time that would be idle (Qi et al.,
"Zero bubble pipeline parallelism", 2023).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hpctrain.core.errors import UsageError
from hpctrain.parallel.schedules.placement import Placed, Placement

Op = Literal["F", "B", "I", "W"]
ActionList = tuple["Action", ...]


class Action(NamedTuple):
    """One operation of a stage on a micro-batch; both are counted from 0."""

    op: Op
    stage: int
    micro: int

    def __str__(self) -> str:
        """Return a text such as "F of micro-batch 3 in stage 1"."""
        return f"{self.op} of micro-batch {self.micro} in stage {self.stage}"


@dataclass(frozen=True, eq=False)  # hashed by identity: there may be thousands of actions
class PipelineSchedule(Placed):
    """The actions of each rank; stage s is computed by rank `placement[s]`."""

    name: str
    micro_batches: int
    placement: Placement
    actions: tuple[ActionList, ...]

    @property
    def ranks(self) -> int:
        """The number of ranks, P."""
        return len(self.actions)

    @property
    def stages_per_rank(self) -> int:
        """The number of stages of each rank, S / P."""
        return self.stages // self.ranks


def action_lists(lists: Iterable[Iterable[Action]]) -> tuple[ActionList, ...]:
    """Return the ranks' lists as tuples."""
    return tuple(tuple(actions) for actions in lists)


def require_counts(
    name: str, ranks: int, micro_batches: int, stages_per_rank: int = 1, expected: int | None = None
) -> None:
    """Raise UsageError unless there is a rank, a micro-batch, and `expected` stages per rank."""
    for count, noun in ((ranks, "rank"), (micro_batches, "micro-batch")):
        if count < 1:
            raise UsageError(f"pipeline schedule {name}: expected 1 {noun} or more, seen {count}")
    if expected is not None and stages_per_rank != expected:
        noun = "stage" if expected == 1 else "stages"
        raise UsageError(
            f"pipeline schedule {name}: expected {expected} {noun} per rank, "
            f"seen {stages_per_rank}; take {expected}, or interleaved or breadth-first"
        )
