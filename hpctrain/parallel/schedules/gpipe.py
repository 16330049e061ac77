"""GPipe: all micro-batches forward, then all backward.

Four ranks, four micro-batches; d is forward of micro-batch d, Bd backward, a dot idle:

    rank 0  0 1 2 3 . . . . . . . . .B0--B1--B2--B3--
    rank 1  . 0 1 2 3 . . . . . .B0--B1--B2--B3-- . .
    rank 2  . . 0 1 2 3 . . .B0--B1--B2--B3-- . . . .
    rank 3  . . . 0 1 2 3B0--B1--B2--B3-- . . . . . .

Bubble: (P-1)(F+B). Peak activations: M on every rank.

The paper takes backward in the reverse order; here backward follows the order of micro-batches, so
that sums have the same bits as on one rank. The time is the same.

Source: Huang et al., "GPipe: efficient training of giant neural networks using pipeline
parallelism", 2019.
"""

from __future__ import annotations

from hpctrain.parallel.schedules import placement
from hpctrain.parallel.schedules.actions import (
    Action,
    PipelineSchedule,
    action_lists,
    require_counts,
)


def gpipe(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> PipelineSchedule:
    """Return the schedule on `ranks` ranks."""
    require_counts("gpipe", ranks, micro_batches, stages_per_rank, 1)
    lists = (
        [Action(op, rank, micro) for op in ("F", "B") for micro in range(micro_batches)]
        for rank in range(ranks)
    )
    return PipelineSchedule("gpipe", micro_batches, placement.straight(ranks), action_lists(lists))
