"""Interleaved 1F1B: v stages per rank, each with 1/v of the layers, which fill the pipeline sooner.

Four ranks, four micro-batches; d is forward of micro-batch d, Bd backward, a dot idle.
The letters a and b are the stages of a rank:

    rank 0  0a 1a 2a 3a 0b 1b 2b 3b  .  .  .  .  .  .B0b---  .B1b---  .B2b---  .B3b---B0a---B1a
    rank 1   . 0a 1a 2a 3a 0b 1b 2b 3b  .  .  .B0b---  .B1b---  .B2b---  .B3b---B0a---B1a---B2a
    rank 2   .  . 0a 1a 2a 3a 0b 1b 2b  .B0b--- 3bB1b---  .B2b---  .B3b---B0a---B1a---B2a---B3a
    rank 3   .  .  . 0a 1a 2a 3a 0bB0b--- 1bB1b--- 2bB2b--- 3bB3b---B0a---B1a---B2a---B3a---  .

    rank 0 ---B2a---B3a---
    rank 1 ---B3a---  .  .
    rank 2 ---  .  .  .  .
    rank 3   .  .  .  .  .

Micro-batches advance in groups of P: a rank takes a group through its first stage, then through its
second one, and so on; backward from its last stage to its first.
Bubble: (P-1)(F+B)/v. Peak activations: (2(P-1-r) + (v-1)P + 1)/v on rank r, at most M.
Messages: v times as many as 1F1B, and from the last rank to the first.

Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
Megatron-LM", 2021.
"""

from __future__ import annotations

from hpctrain.core.errors import UsageError
from hpctrain.parallel.schedules import placement
from hpctrain.parallel.schedules.actions import (
    Action,
    Op,
    PipelineSchedule,
    action_lists,
    require_counts,
)
from hpctrain.parallel.schedules.one_forward_one_backward import alternate


def interleaved(ranks: int, micro_batches: int, stages_per_rank: int = 2) -> PipelineSchedule:
    """Return the schedule on `ranks` ranks; `micro_batches` must be a multiple of `ranks`."""
    _check_counts(ranks, micro_batches, stages_per_rank)
    loops = range(stages_per_rank)
    lists = (
        alternate(
            _order("F", rank, ranks, micro_batches, loops),
            _order("B", rank, ranks, micro_batches, loops[::-1]),
            2 * (ranks - 1 - rank) + (stages_per_rank - 1) * ranks,
        )
        for rank in range(ranks)
    )
    stages = placement.looped(ranks, stages_per_rank)
    return PipelineSchedule("interleaved", micro_batches, stages, action_lists(lists))


def _check_counts(ranks: int, micro_batches: int, stages_per_rank: int) -> None:
    require_counts("interleaved", ranks, micro_batches)
    if stages_per_rank < 2:
        raise UsageError(
            f"interleaved: expected 2 stages per rank or more, seen {stages_per_rank}; take 1f1b"
        )
    if micro_batches % ranks:
        lower = micro_batches // ranks * ranks
        multiples = [lower, lower + ranks] if lower else [ranks]
        raise UsageError(
            f"interleaved: expected a multiple of {ranks} ranks as micro-batches, seen "
            f"{micro_batches}; take {' or '.join(map(str, multiples))}"
        )


def _order(op: Op, rank: int, ranks: int, micro_batches: int, loops: range) -> list[Action]:
    """Return the actions of `rank`: groups of P micro-batches through its stages, as `loops`."""
    return [
        Action(op, loop * ranks + rank, micro)
        for first in range(0, micro_batches, ranks)
        for loop in loops
        for micro in range(first, first + ranks)
    ]
