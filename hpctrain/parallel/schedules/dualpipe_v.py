"""DualPipe-V: two stages per rank, placed as a V; a forward and a backward side by side.

PICTURE

In the steady state F of one stage stands beside B of the other ("Fb", "fB"): on devices that send
while they compute, the messages of one pass behind the computation of the other. Their weight
products are put off only where a bubble would be.
Bubble: (P-1)(F&B + B - 3W) in units of one stage's times, where F&B is that of a forward and a
backward side by side, here F+B. Peak activations: 2P+1 stages.

Sources: DeepSeek-AI, "DeepSeek-V3 technical report", 2024, and its DualPipe, 2025, which has the
model twice; Qi et al. cut it in half, to one model on half of the ranks.
"""

from __future__ import annotations

from hpctrain.parallel.actions import PipelineSchedule
from hpctrain.parallel.schedules.vee import vee_schedule

WEIGHT_OF = str.maketrans("Ii", "Ww")


def dualpipe_v(ranks: int, micro_batches: int, stages_per_rank: int = 2) -> PipelineSchedule:
    """Return the schedule on `ranks` ranks."""
    return vee_schedule("dualpipe-v", _pattern, ranks, micro_batches, stages_per_rank)


def _pattern(rank: int, ranks: int, micro_batches: int) -> str:
    distance = ranks - 1 - rank  # to the tip of the V
    fill = "FF" * distance + "Ff" * (rank + 1) + "iwf" * distance
    steady = "FbfB" * (micro_batches - 2 * ranks + rank + 1) + "bfB" * distance
    return fill + steady + _drain(rank + 1, distance)


def _drain(count: int, distance: int) -> str:
    """Return `count` backwards of both stages, half of them without W; then the rest and all W."""
    backwards, inputs = ("bB" * count)[:count], ("iI" * count)[count:]
    weights = (inputs + "I" * distance).translate(WEIGHT_OF)
    return backwards + inputs + "".join(w + "I" for w in weights[:distance]) + weights[distance:]
