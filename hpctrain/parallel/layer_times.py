"""Times of a model's layers, measured one by one: the costs for the cut into stages.

The values of parameters and samples do not matter for the time, so each layer is run on small random
numbers, without an arena, and equal layers are run once. A cut changes no result, so ranks may
follow the times of one of them.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from hpctrain import nn
from hpctrain.core.trees import make_arrays
from hpctrain.core.xp import Array, finish, like
from hpctrain.gradients.replica import ignore_ready

SAMPLES = 4
REPEATS = 3  #: the fastest counts


def layer_seconds(model: nn.Model, memory: Array) -> list[float]:
    """Return the seconds of forward and backward of each layer, in the memory of `memory`."""
    times: dict[str, float] = {}
    keys = [
        f"{layer!r} {shape}" for layer, shape in zip(model.layers.values(), model.shapes, strict=False)
    ]
    for i, key in enumerate(keys):
        if key not in times:
            part = nn.Part(model, i, i + 1)
            times[key] = min(_seconds(model, part, memory) for _ in range(REPEATS))
    return [times[key] for key in keys]
