"""ZB-V: two stages per rank, placed as a V, and weight products apart: no bubble inside the pass.

Four ranks, eight micro-batches; d is forward of micro-batch d, Id and Wd backward, a dot idle.
The letters a and b are the stages of a rank:

    rank 0  0a 1a 2a 3a 4a 5a 6a 0bI0bW0b 1bI1bW1b 2bI2bW2b 3bI3bW3b 7aI0aW0a 4bI4bW4bI1aW1a 5b
    rank 1   . 0a 1a 2a 3a 4a 0b 5a 1bI0bW0b 2bI1bW1b 3bI2bW2b 6aI0aW0a 4bI3bW3b 7aI1aW1a 5bI4b
    rank 2   .  . 0a 1a 2a 0b 3a 1b 4a 2bI0bW0b 3bI1bW1b 5aI0aW0a 4bI2bW2b 6aI1aW1a 5bI3bW3b 7a
    rank 3   .  .  . 0a 0b 1a 1b 2a 2b 3a 3bI0bW0b 4aI0aW0a 4bI1bW1b 5aI1aW1a 5bI2bW2b 6aI2aW2a

    rank 0 I5bW5bI2aW2a 6bI6bW6bI3aW3a 7bI7bW7bI4aW4aI5aW5aI6aW6aI7aW7a  .  .  .
    rank 1 W4bI2aW2a 6bI5bW5bI3aW3a 7bI6bW6bI4aI7bI5aW4aI6aW5aI7aW6aW7bW7a  .  .
    rank 2 I2aW2a 6bI4bW4bI3aW3a 7bI5bW5bI4aI6bI5aI7bI6aW4aI7aW5aW6bW7bW6aW7a  .
    rank 3  6bI3bW3b 7aI3aW3a 7bI4bW4bI4aI5bI5aI6bI6aI7bI7aW4aW5bW6bW7bW5aW6aW7a

Rank 0 has both ends of the model, so backward begins where forward began, and all ranks hold
equally many activations. In the steady state a rank takes F, I and W of either stage in turn.
Bubble: (P-1)F/2 if F = I = W and M >= 2P-1, the time before the last rank can begin: no schedule on
a V has less. Peak activations: P on every rank.

Source: Qi, Wan, Amar and Lin, "Pipeline parallelism with controllable memory", 2024.
"""

from __future__ import annotations

from hpctrain.parallel.schedules.actions import PipelineSchedule
from hpctrain.parallel.schedules.vee import vee_schedule


def zb_v(ranks: int, micro_batches: int, stages_per_rank: int = 2) -> PipelineSchedule:
    """Return the schedule on `ranks` ranks."""
    return vee_schedule("zb-v", _pattern, ranks, micro_batches, stages_per_rank)


def _pattern(rank: int, ranks: int, micro_batches: int) -> str:
    distance = ranks - 1 - rank  # to the tip of the V
    fill = "F" * (2 * distance + 1) + "fF" * rank + "fiw" * (distance + 1)
    steady = "FIWfiw" * (micro_batches - 2 * ranks + rank + 1) + "IWfiw" * distance
    return fill + steady + "Ii" * rank + "IW" * (distance + 1) + "w" * rank + "W" * rank
