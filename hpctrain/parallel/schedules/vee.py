"""Lists of schedules with two stages per rank, placed as a V, from patterns of letters.

    F B I W   the rank's first stage, down the V
    f b i w   its second stage, up the V

Each letter is an action on the next micro-batch of its operation and stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import cast

from hpctrain.parallel.schedules import placement
from hpctrain.parallel.schedules.actions import (
    Action,
    Op,
    PipelineSchedule,
    action_lists,
    require_counts,
)

Pattern = Callable[[int, int, int], str]  #: of (rank, ranks, micro_batches): the rank's letters


def vee_schedule(
    name: str, pattern: Pattern, ranks: int, micro_batches: int, stages_per_rank: int
) -> PipelineSchedule:
    """Return the schedule of `pattern`, which holds for 2P micro-batches or more.

    For fewer, the actions of micro-batches beyond `micro_batches` are left out: nothing needs them.
    """
    require_counts(name, ranks, micro_batches, stages_per_rank, 2)
    pattern_size = max(micro_batches, 2 * ranks)
    lists = (
        (
            action
            for action in _number_actions(
                pattern(rank, ranks, pattern_size), rank, 2 * ranks - 1 - rank
            )
            if action.micro < micro_batches
        )
        for rank in range(ranks)
    )
    return PipelineSchedule(name, micro_batches, placement.vee(ranks), action_lists(lists))


def _number_actions(letters: str, down: int, up: int) -> Iterator[Action]:
    """Yield the action of each letter; B counts as I and W."""
    counts: Counter[tuple[str, int]] = Counter()
    for letter in letters:
        op, stage = cast(Op, letter.upper()), down if letter.isupper() else up
        parts = "IW" if op == "B" else op
        yield Action(op, stage, counts[parts[0], stage])
        counts.update((part, stage) for part in parts)
