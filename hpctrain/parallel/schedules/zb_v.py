"""ZB-V: two stages per rank, placed as a V, and weight products apart: no bubble inside the pass.

PICTURE

Rank 0 has both ends of the model, so the last stage has no way back to go, and all ranks hold
equally many activations. In the steady state a rank takes F, I and W of either stage in turn.
Bubble: none if F = I = W, but for the (P-1)F/2 before the last rank begins; no schedule has less.
Peak activations: P on every rank.

Source: Qi, Wan, Amar and Lin, "Pipeline parallelism with controllable memory", 2024.
"""

from __future__ import annotations

from hpctrain.parallel.actions import PipelineSchedule
from hpctrain.parallel.schedules.vee import vee_schedule


def zb_v(ranks: int, micro_batches: int, stages_per_rank: int = 2) -> PipelineSchedule:
    """Return the schedule on `ranks` ranks."""
    return vee_schedule("zb-v", _pattern, ranks, micro_batches, stages_per_rank)


def _pattern(rank: int, ranks: int, micro_batches: int) -> str:
    distance = ranks - 1 - rank  # to the tip of the V
    fill = "F" * (2 * distance + 1) + "fF" * rank + "fiw" * (distance + 1)
    steady = "FIWfiw" * (micro_batches - 2 * ranks + rank + 1) + "IWfiw" * distance
    return fill + steady + "Ii" * rank + "IW" * (distance + 1) + "w" * rank + "W" * rank
