"""Breadth-first: v stages per rank; all micro-batches through a stage before the next stage.

PICTURE

A rank finishes with the parameters of a stage before it begins the next: they are gathered once per
pass and step, and their gradients are reduced early. That suits parameters sharded over the ranks
of the data axis.
Bubble: (P-1)(F+B)/v if M >= P. Peak activations: M on every rank, as GPipe.

Source: Lamy-Poirier, "Breadth-first pipeline parallelism", 2023.
"""

from __future__ import annotations

from hpctrain.core.errors import UsageError
from hpctrain.parallel import placement
from hpctrain.parallel.actions import Action, PipelineSchedule, action_lists, require_counts


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
