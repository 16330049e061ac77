"""DualPipe-V: two stages per rank, placed as a V; a forward and a backward side by side.

Four ranks, eight micro-batches; d is forward of micro-batch d, Bd backward, Id and Wd its parts, a
dot idle.
The letters a and b are the stages of a rank:

    rank 0  0a 1a 2a 3a 4a 5a 6a 0bI0bW0b 1bI1bW1b 2bI2bW2b 3b 7aB3b--- 4bB0a---B4b--- 5b  .B1a
    rank 1   . 0a 1a 2a 3a 4a 0b 5a 1bI0bW0b 2bI1bW1b 3b 6aB2b--- 4bB0a--- 7aB3b--- 5bB1a---B4b
    rank 2   .  . 0a 1a 2a 0b 3a 1b 4a 2bI0bW0b 3b 5aB1b--- 4bB0a--- 6aB2b--- 5bB1a--- 7aB3b---
    rank 3   .  .  . 0a 0b 1a 1b 2a 2b 3a 3b 4aB0b--- 4bB0a--- 5aB1b--- 5bB1a--- 6aB2b--- 6bB2a

    rank 0 ---B5b--- 6b  .B2a---B6b--- 7b  .B3a---B7b---I4aW4aI5aW5aI6aW6aI7aW7a
    rank 1 --- 6b  .B2a---B5b--- 7b  .B3a---B6b---B4a---I7bI5aW7bI6aW5aI7aW6aW7a
    rank 2  6bB2a---B4b--- 7b  .B3a---B5b---B4a---B6b---I5aI7bI6aW5aI7aW7bW6aW7a
    rank 3 --- 7aB3b--- 7bB3a---B4b---B4a---B5b---B5a---I6bI6aI7bI7aW6bW6aW7bW7a

In the steady state F of a stage stands beside B of the other stage: on devices that send while they
compute, messages of the one are hidden behind the other. W is put off only where ranks would idle.
Bubble: (P-1)(F&B + B - 3W)/2 if M >= 2P, where F&B is the time of a forward and a backward side by
side, both sent at its end. Here one follows the other and each is sent at once: (P-1)/2 of F, as
ZB-V, if F = I = W. Peak activations: 2P+1 stages, half a rank's share more than 1F1B.

Sources: DeepSeek-AI, "DeepSeek-V3 technical report", 2024, and its DualPipe, 2025, which has the
model twice; Qi et al. cut it in half, to one model on half of the ranks.
"""

from __future__ import annotations

from hpctrain.parallel.schedules.actions import PipelineSchedule
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
    """Return `count` backwards of both stages, the first half without W; then the deferred W."""
    backwards, inputs = ("bB" * count)[:count], ("iI" * count)[count:]
    weights = (inputs + "I" * distance).translate(WEIGHT_OF)
    return backwards + inputs + "".join(w + "I" for w in weights[:distance]) + weights[distance:]
