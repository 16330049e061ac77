"""Times of a model's layers, measured one by one: the costs for the cut into stages.

The values of parameters and samples do not matter for the time, so each layer is run on random
numbers, without an arena, and equal layers are run once. A cut changes no result, so all ranks may
follow the times of one of them.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from hpctrain import nn
from hpctrain.core.xp import Array, finish, like
from hpctrain.gradients.replica import ignore_ready
from hpctrain.nn.gradient_sums import GradientSums
from hpctrain.nn.part import Part

SAMPLES = 4
REPEATS = 3  #: the fastest counts


def layer_seconds(model: nn.Model, memory: Array) -> list[float]:
    """Return the seconds of forward and backward of each layer, in the memory of `memory`.

    Arrays have the dtype of `memory`.
    """
    times: dict[str, float] = {}
    layers = zip(model.layers.values(), model.shapes, strict=False)  # shapes: one more, the output
    keys = [f"{layer} {shape}" for layer, shape in layers]
    for i, key in enumerate(keys):
        if key not in times:
            times[key] = _seconds(model, Part(model, i, i + 1), memory)
    return [times[key] for key in keys]


def _seconds(model: nn.Model, part: Part, memory: Array) -> float:
    """Return the least of some times of forward and backward of `part`, one layer."""
    names = {**part.parameters, **part.shared}
    params = {name: _random(p.shape, memory) for name, p in names.items()}
    grads = {name: _random(p.shape, memory) for name, p in part.parameters.items()}
    shape = model.shapes[part.start]
    if part.start:
        x = _random((SAMPLES, *shape), memory)
    else:  # zeros are valid as numbers and as indices, on the host as data are
        x = model.prepare_samples(_zeros(shape), memory)
    key = nn.Key(seed=0, step=0, first=0, samples=SAMPLES)
    times = []
    for _ in range(REPEATS):
        start = perf_counter()
        y, tape = part.forward(params, x, key)
        sums = GradientSums(part, grads, 1, ignore_ready)
        part.backward(params, sums, tape, y)
        finish(memory)
        times.append(perf_counter() - start)
    return min(times)


def _random(shape: tuple[int, ...], memory: Array) -> Array:
    return like(memory, np.random.default_rng(0).standard_normal(shape), memory.dtype)


def _zeros(shapes: Any) -> Any:
    """Return SAMPLES zeros of each shape of a tree of shapes."""
    if isinstance(shapes, dict):
        return {name: _zeros(shape) for name, shape in shapes.items()}
    if any(not isinstance(n, int) for n in shapes):
        return tuple(map(_zeros, shapes))
    return np.zeros((SAMPLES, *shapes), np.float32)
