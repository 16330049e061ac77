"""1F1B (PipeDream-Flush): backward as early as possible, so that few activations live at once.

Four ranks, eight micro-batches; d is forward of micro-batch d, Bd backward, a dot idle:

    rank 0  0 1 2 3 . . . . . .B0-- 4B1-- 5B2-- 6B3-- 7B4-- .B5-- .B6-- .B7--
    rank 1  . 0 1 2 . . . .B0-- 3B1-- 4B2-- 5B3-- 6B4-- 7B5-- .B6-- .B7-- . .
    rank 2  . . 0 1 . .B0-- 2B1-- 3B2-- 4B3-- 5B4-- 6B5-- 7B6-- .B7-- . . . .
    rank 3  . . . 0B0-- 1B1-- 2B2-- 3B3-- 4B4-- 5B5-- 6B6-- 7B7-- . . . . . .

Rank r begins with P - 1 - r micro-batches forward, then takes one forward and one backward in turn.
Bubble: (P-1)(F+B), as GPipe. Peak activations: P - r on rank r, at most M.

Sources: Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", 2019, and
"Memory-efficient pipeline-parallel DNN training", 2021, where it is PipeDream-Flush.
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


def one_forward_one_backward(
    ranks: int, micro_batches: int, stages_per_rank: int = 1
) -> PipelineSchedule:
    """Return the schedule on `ranks` ranks."""
    require_counts("1f1b", ranks, micro_batches, stages_per_rank, 1)
    lists = (
        alternate(
            [Action("F", rank, micro) for micro in range(micro_batches)],
            [Action("B", rank, micro) for micro in range(micro_batches)],
            ranks - 1 - rank,
        )
        for rank in range(ranks)
    )
    return PipelineSchedule("1f1b", micro_batches, placement.straight(ranks), action_lists(lists))


def alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> Iterator[Action]:
    """Yield `warm_up` forwards, then a forward and a backward in turn, then the other backwards."""
    yield from forwards[:warm_up]
    remaining = iter(backwards)
    for forward in forwards[warm_up:]:
        yield forward
        yield next(remaining)
    yield from remaining
