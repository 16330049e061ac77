"""1F1B (PipeDream-Flush): backward as early as possible, so that few activations live at once.

PICTURE

Rank r begins with P - 1 - r micro-batches forward, then takes one forward and one backward in turn.
Bubble: (P-1)(F+B), as GPipe. Peak activations: P - r on rank r, at most M.

Source: Narayanan et al., "Memory-efficient pipeline-parallel DNN training" (PipeDream-2BW), 2021;
the same authors, "PipeDream", 2019, without the flush.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.parallel import placement
from hpctrain.parallel.actions import (
    Action,
    PipelineSchedule,
    action_lists,
    require_counts,
    require_stages_per_rank,
)


def one_forward_one_backward(
    ranks: int, micro_batches: int, stages_per_rank: int = 1
) -> PipelineSchedule:
    """Return the schedule on `ranks` ranks."""
    require_counts("1f1b", ranks, micro_batches)
    require_stages_per_rank("1f1b", stages_per_rank, 1)
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
