"""A forward pass alone, for evaluation: stage by stage over windows of P micro-batches.

Two ranks with two stages each, four micro-batches; stage 2 is the second one of rank 0:

    rank 0   F0 F1   f0 f1   F2 F3   f2 f3      F stage 0, f stage 2
    rank 1      F0 F1   f0 f1   F2 F3   f2 f3   F stage 1, f stage 3

A window keeps all ranks busy until its first micro-batch comes round to them again.
"""

from __future__ import annotations

from hpctrain.parallel.schedules.actions import Action, PipelineSchedule


def forward_only(micro_batches: int, placement: tuple[int, ...]) -> PipelineSchedule:
    """Return the forward passes of `micro_batches` through stages placed on ranks."""
    ranks = max(placement) + 1
    windows = [
        range(first, min(first + ranks, micro_batches)) for first in range(0, micro_batches, ranks)
    ]
    lists = tuple(
        tuple(
            Action("F", stage, micro)
            for window in windows
            for stage, owner in enumerate(placement)
            if owner == rank
            for micro in window
        )
        for rank in range(ranks)
    )
    return PipelineSchedule("forward", micro_batches, placement, lists)
