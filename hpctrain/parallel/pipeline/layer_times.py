"""Times of a model's layers, measured one by one: the costs for the cut into stages.

The values of parameters and samples do not matter for the time, so each layer is run on random
numbers, without an arena, and equal layers are run once. A cut changes no result, so all ranks may
follow the times of rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from hpctrain import nn
from hpctrain.core.xp import Array, finish, like
from hpctrain.gradients.replica import ignore_ready
from hpctrain.nn.part import GradientSums, Part
from hpctrain.parallel.timing.clock import StageCosts

SAMPLES = 4
REPEATS = 3  #: the fastest counts


class LayerSeconds(NamedTuple):
    """Seconds of a layer: forward, gradient of its input, gradients of its parameters."""

    forward: float
    input: float
    weight: float


def layer_seconds(model: nn.Model, memory: Array, samples: int = SAMPLES) -> list[LayerSeconds]:
    """Return the seconds of each layer on `samples` samples, in the memory of `memory`.

    Arrays have the dtype of `memory`.
    """
    times: dict[str, LayerSeconds] = {}
    layers = zip(model.layers.values(), model.shapes, strict=False)  # shapes: one more, the output
    keys = [f"{layer} {shape}" for layer, shape in layers]
    for i, key in enumerate(keys):
        if key not in times:
            times[key] = _time_layer(model, Part(model, i, i + 1), memory, samples)
    return [times[key] for key in keys]


def stage_costs(layers: Sequence[LayerSeconds], bounds: Sequence[int]) -> StageCosts:
    """Return the costs of stages; stage s has the layers `bounds[s]` to `bounds[s + 1] - 1`."""
    stages = [layers[start:stop] for start, stop in pairwise(bounds)]
    columns = zip(*(map(sum, zip(*stage, strict=True)) for stage in stages), strict=True)
    return StageCosts(*columns)


def _time_layer(model: nn.Model, part: Part, memory: Array, samples: int) -> LayerSeconds:
    """Return the least of some times of forward and backward of `part`, one layer."""
    parameters = {**part.parameters, **part.shared}
    params = {name: _random_array(p.shape, memory) for name, p in parameters.items()}
    grads = {name: _random_array(p.shape, memory) for name, p in part.parameters.items()}
    x = example_input(model, part.start, samples, memory)
    key = nn.Key(seed=0, step=0, first=0, samples=samples)
    measured_seconds = [_time_passes(part, params, grads, x, key, memory) for _ in range(REPEATS)]
    return LayerSeconds(*map(min, zip(*measured_seconds, strict=True)))


def _time_passes(
    part: Part,
    params: dict[str, Array],
    grads: dict[str, Array],
    x: Any,
    key: nn.Key,
    memory: Array,
) -> LayerSeconds:
    """Return the seconds of F, I and W of `part`."""
    products, readings = list[Any](), [perf_counter()]

    def read_clock() -> None:
        finish(memory)
        readings.append(perf_counter())

    y, tape = part.forward(params, x, key)
    read_clock()
    part.backward(params, GradientSums(part, grads, 1, ignore_ready), tape, y, products.append)
    read_clock()
    for product in products:
        product()
    read_clock()
    return LayerSeconds(*(stop - start for start, stop in pairwise(readings)))


def example_input(model: nn.Model, layer: int, samples: int, memory: Array) -> Any:
    """Return an input of `layer` for `samples` samples, in the memory of `memory`."""
    shape = model.shapes[layer]
    if layer:
        return _random_array((samples, *shape), memory)
    # zeros are valid as numbers and as indices, on the host as data are
    return model.prepare_samples(_zeros(shape, samples), memory)


def _random_array(shape: tuple[int, ...], memory: Array) -> Array:
    return like(memory, np.random.default_rng(0).standard_normal(shape), memory.dtype)


def _zeros(shapes: Any, samples: int) -> Any:
    """Return `samples` zeros of each shape of a tree of shapes."""
    if isinstance(shapes, dict):
        return {name: _zeros(shape, samples) for name, shape in shapes.items()}
    if any(not isinstance(n, int) for n in shapes):
        return tuple(_zeros(shape, samples) for shape in shapes)
    return np.zeros((samples, *shapes), np.float32)
