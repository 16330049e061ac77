"""Predicted steps on grids of data x pipe ranks: of a recipe, or of a transformer by its sizes.

layers: seconds, bytes  ->  stages  ->  clock of the schedule  ->  rings over the data axis
measured, or assumed        cut         wires of the machine       parallel/timing/predict.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from hpctrain import nn
from hpctrain.core.errors import UsageError
from hpctrain.gradients.precision import master_dtype
from hpctrain.parallel.options import MeshOptions
from hpctrain.parallel.pipeline import balance, stages
from hpctrain.parallel.pipeline.layer_times import LayerSeconds, layer_seconds, stage_costs
from hpctrain.parallel.schedules import make
from hpctrain.parallel.timing.predict import Grid, GridStep, predict_step
from hpctrain.training import runs
from hpctrain.training.recipe import Recipe
from hpctrain.tuning.model.loggp import Cluster

FLOPS_PER_PARAMETER = 2  #: and token, of each of F, I and W
NUMBER_BYTES = 4  #: of a float32


@dataclass(frozen=True)
class LayeredModel:
    """The layers of a model, for a micro-batch of `samples` samples."""

    seconds: Sequence[LayerSeconds]
    boundary_bytes: Sequence[int]  #: between the layers i and i + 1
    gradient_bytes: Sequence[int]
    samples: float
    model: nn.Model | None = None  #: None: all layers are alike

    def scaled(self, samples: float) -> LayeredModel:
        """Return the layers for micro-batches of `samples` samples, all in proportion."""
        factor = samples / self.samples
        return replace(
            self,
            seconds=[LayerSeconds(*(factor * s for s in layer)) for layer in self.seconds],
            boundary_bytes=[round(factor * n) for n in self.boundary_bytes],
            samples=samples,
        )

    def bounds(self, placement: tuple[int, ...]) -> Sequence[int]:
        """Return the first layer of each stage, then the number of layers."""
        if self.model is not None:
            return stages.plan_by_times(self.model, self.seconds, placement).bounds
        counts = balance.cut([sum(layer) for layer in self.seconds], len(placement))
        return [0, *np.cumsum(counts).tolist()]


def measure_recipe(spec: Recipe, samples: int) -> LayeredModel:
    """Return the layers of a recipe's model, timed in this process on `samples` samples."""
    model = runs.build_model(spec, spec.data.load(spec.run.seed))
    if not isinstance(model, nn.Model):
        raise UsageError(f"{spec.run.name}: expected an ht.nn.Model, seen {type(model).__name__}")
    stages.require_splittable(model)
    dtype = master_dtype(spec.run.precision)
    return LayeredModel(
        layer_seconds(model, np.zeros(1, dtype), samples),
        [samples * dtype.itemsize * prod(shape) for shape in model.shapes[1:-1]],
        [round(dtype.itemsize * count) for count in stages.parameter_counts(model)],
        samples,
        model,
    )


def transformer(
    parameters: float, layers: int, width: int, length: int, flops: float
) -> LayeredModel:
    """Return equal layers for one text of `length` tokens, on ranks of `flops` per second."""
    share = parameters / layers
    seconds = FLOPS_PER_PARAMETER * share * length / flops
    return LayeredModel(
        [LayerSeconds(seconds, seconds, seconds)] * layers,
        [NUMBER_BYTES * length * width] * (layers - 1),
        [round(NUMBER_BYTES * share)] * layers,
        1,
    )


def predict_grid(
    model: LayeredModel,
    schedule_name: str,
    pipe: int,
    micro_batches: int,
    grid: Grid,
) -> GridStep:
    """Return the step of `grid.data` pipelines of `pipe` ranks; one rank alone has one stage."""
    schedule = make(schedule_name if pipe > 1 else "gpipe", pipe, micro_batches)
    bounds = model.bounds(schedule.placement)
    return predict_step(
        schedule,
        stage_costs(model.seconds, bounds),
        grid,
        [model.boundary_bytes[bound - 1] for bound in bounds[1:-1]],
        [sum(model.gradient_bytes[start:stop]) for start, stop in pairwise(bounds)],
    )


def fitting_grids(
    ranks: Sequence[int], pipes: Sequence[int], most_replicas: float
) -> list[tuple[int, int]]:
    """Return the pairs (ranks, pipe) where pipe divides ranks; UsageError if there are none.

    `most_replicas`: the number of replicas that get a sample.
    """
    pairs = [(count, pipe) for count in ranks for pipe in pipes if count % pipe == 0]
    if not pairs:
        MeshOptions(pipe=pipes[0]).workers(ranks[0])
    grids = [pair for pair in pairs if pair[0] // pair[1] <= most_replicas]
    if not grids:
        raise UsageError(
            f"--batch: expected a sample per replica, seen {most_replicas:g} samples for "
            f"{pairs[0][0] // pairs[0][1]} replicas; raise --batch or --pipe"
        )
    return grids


def grid_rows(
    model: LayeredModel,
    grids: Sequence[tuple[int, int]],
    schedule: str,
    micro_batches: int,
    batch: int,
    mode: str,
    cluster: Cluster,
    ranks_per_node: int,
) -> Iterator[dict[str, Any]]:
    """Yield a row per (ranks, pipe); `batch`: samples per replica (weak) or step (strong)."""
    for ranks, pipe in grids:
        data = ranks // pipe
        samples = batch if mode == "weak" else batch / data
        count = min(micro_batches, int(samples))
        step = predict_grid(
            model.scaled(samples / count), schedule, pipe, count,
            Grid(cluster, data, ranks_per_node),
        )  # fmt: skip
        yield {
            "ranks": ranks,
            "data": data,
            "pipe": pipe,
            "schedule": schedule,
            "micro_batches": count,
            "step_s": step.step,
            "pipeline_s": step.pipeline,
            "compute_s": step.compute,
            "efficiency": step.efficiency,
            "samples_per_s": samples * data / step.step,
        }
