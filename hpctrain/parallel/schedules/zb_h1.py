"""ZB-H1: 1F1B whose weight products W are put off into the bubble, in the memory of 1F1B.

Four ranks, eight micro-batches; d is forward of micro-batch d, Id and Wd backward, a dot idle:

    rank 0  0 1 2 3 . . .I0W0 4I1W1 5I2W2 6I3W3 7I4W4I5W5I6W6I7W7
    rank 1  . 0 1 2 . .I0 3I1W0 4I2W1 5I3W2 6I4W3 7I5W4I6W5I7W6W7
    rank 2  . . 0 1 .I0 2I1 3I2W0 4I3W1 5I4W2 6I5W3 7I6W4I7W5W6W7
    rank 3  . . . 0I0 1I1 2I2 3I3W0 4I4W1 5I5W2 6I6W3 7I7W4W5W6W7

Rank r takes W of micro-batch m - r after I of micro-batch m: the later the rank, the more of its
products wait for the end of the step, where rank 0 still receives gradients.
Bubble: (P-1)(F+I-W), a third of 1F1B's if F = I = W. Peak activations: P on every rank, at most M.

Source: Qi, Wan, Huang and Lin, "Zero bubble pipeline parallelism", 2023.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.parallel.schedules import placement
from hpctrain.parallel.schedules.actions import (
    Action,
    PipelineSchedule,
    action_lists,
    require_counts,
)


def zb_h1(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> PipelineSchedule:
    """Return the schedule on `ranks` ranks."""
    require_counts("zb-h1", ranks, micro_batches, stages_per_rank, 1)
    lists = (_actions(rank, ranks, micro_batches) for rank in range(ranks))
    return PipelineSchedule("zb-h1", micro_batches, placement.straight(ranks), action_lists(lists))


def _actions(rank: int, ranks: int, micro_batches: int) -> Iterator[Action]:
    warm_up = min(ranks - 1 - rank, micro_batches)
    yield from (Action("F", rank, micro) for micro in range(warm_up))
    for micro in range(micro_batches):
        if micro + warm_up < micro_batches:
            yield Action("F", rank, micro + warm_up)
        yield Action("I", rank, micro)
        if micro >= rank:
            yield Action("W", rank, micro - rank)
    yield from (
        Action("W", rank, micro) for micro in range(max(0, micro_batches - rank), micro_batches)
    )
