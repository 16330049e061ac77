"""Breadth-first: v stages per rank; all micro-batches through a stage before the next stage.

Four ranks, four micro-batches; d is forward of micro-batch d, Bd backward, a dot idle.
The letters a and b are the stages of a rank:

    rank 0  0a 1a 2a 3a 0b 1b 2b 3b  .  .  .  .  .  .  .  .  .B0b---B1b---B2b---B3b---B0a---B1a
    rank 1   . 0a 1a 2a 3a 0b 1b 2b 3b  .  .  .  .  .  .B0b---B1b---B2b---B3b---B0a---B1a---B2a
    rank 2   .  . 0a 1a 2a 3a 0b 1b 2b 3b  .  .  .B0b---B1b---B2b---B3b---B0a---B1a---B2a---B3a
    rank 3   .  .  . 0a 1a 2a 3a 0b 1b 2b 3bB0b---B1b---B2b---B3b---B0a---B1a---B2a---B3a---  .

    rank 0 ---B2a---B3a---
    rank 1 ---B3a---  .  .
    rank 2 ---  .  .  .  .
    rank 3   .  .  .  .  .

A rank finishes with the parameters of a stage before it begins the next: they are gathered once per
pass and step, and their gradients are reduced early. That suits parameters sharded over the ranks
of the data axis.
Bubble: (P-1)(F+B)/v if M >= P. Peak activations: M on every rank, as GPipe.

Source: Lamy-Poirier, "Breadth-first pipeline parallelism", 2023.
"""

from __future__ import annotations

from hpctrain.core.errors import UsageError
from hpctrain.parallel.schedules import placement
from hpctrain.parallel.schedules.actions import (
    Action,
    PipelineSchedule,
    action_lists,
    require_counts,
)


def breadth_first(ranks: int, micro_batches: int, stages_per_rank: int = 2) -> PipelineSchedule:
    """Return the schedule on `ranks` ranks."""
    require_counts("breadth-first", ranks, micro_batches)
    if stages_per_rank < 2:
        raise UsageError(
            f"breadth-first: expected 2 stages per rank or more, seen {stages_per_rank}; take gpipe"
        )
    lists = (_actions(rank, ranks, micro_batches, stages_per_rank) for rank in range(ranks))
    return PipelineSchedule(
        "breadth-first",
        micro_batches,
        placement.looped(ranks, stages_per_rank),
        action_lists(lists),
    )


def _actions(rank: int, ranks: int, micro_batches: int, stages_per_rank: int) -> list[Action]:
    stages = range(rank, ranks * stages_per_rank, ranks)
    return [
        *(Action("F", stage, micro) for stage in stages for micro in range(micro_batches)),
        *(Action("B", stage, micro) for stage in stages[::-1] for micro in range(micro_batches)),
    ]
