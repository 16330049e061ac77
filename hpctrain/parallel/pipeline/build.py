"""A pipeline from a model and options: the cut into stages, the ranks, the replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpctrain import nn
from hpctrain.core import xp
from hpctrain.core.allocator import keep_freed_memory
from hpctrain.gradients.precision import Precision, master_dtype
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.options import PipelineOptions
from hpctrain.parallel.pipeline import stages
from hpctrain.parallel.pipeline.layer_times import LayerSeconds, layer_seconds
from hpctrain.parallel.pipeline.replica import PipelineReplica
from hpctrain.parallel.pipeline.stages import StagePlan
from hpctrain.parallel.schedules import make


def make_pipeline(
    model: Any,
    seed: int,
    precision: Precision,
    on_gpu: bool,
    mesh: Mesh,
    options: PipelineOptions,
) -> PipelineReplica:
    """Return this rank's part of a replica of `model`, an nn.Model; collective.

    Raises UsageError on all ranks if the model cannot be cut, and GpuMemoryError on the rank itself
    if its GPU has too little memory.
    """
    everyone = mesh.everyone
    placement = everyone.on_all_ranks(lambda: _place_stages(model, mesh, options))
    # Between the votes: a rank that fails before it would wait in a vote, others for rank 0.
    times = (
        None
        if options.balance == "even" or not isinstance(options.balance, str)
        else _measure_times(model, precision, on_gpu, mesh)
    )
    plan = everyone.on_all_ranks(lambda: _make_plan(model, options, placement, times))
    if on_gpu:
        xp.allow_tf32(precision == "tf32")
    else:
        keep_freed_memory()
    dtype = master_dtype(precision)
    return PipelineReplica(model, seed, dtype, on_gpu, mesh.pipe, mesh.grid, plan, options.schedule)


def _place_stages(model: nn.Model, mesh: Mesh, options: PipelineOptions) -> tuple[int, ...]:
    """Return the rank of each stage; raise UsageError if the model has too few layers."""
    stages.require_splittable(model)
    ranks = mesh.pipe.size
    placement = make(options.schedule, ranks, 2 * ranks, options.stages_per_rank).placement
    if isinstance(options.balance, str):
        stages.require_stages(model, len(placement))
    return placement


def _make_plan(
    model: nn.Model,
    options: PipelineOptions,
    placement: tuple[int, ...],
    times: Sequence[LayerSeconds] | None,
) -> StagePlan:
    """Return the stages by `options`, or by the measured `times` of the layers."""
    if not isinstance(options.balance, str):
        return stages.plan_by_hand(model, options.balance, placement)
    if times is None:
        return stages.plan_by_costs(model, stages.parameter_counts(model), placement)
    return stages.plan_by_times(model, times, placement)


def _measure_times(
    model: nn.Model, precision: Precision, on_gpu: bool, mesh: Mesh
) -> list[LayerSeconds]:
    """Return the seconds of each layer on rank 0; collective."""
    zeros = xp.zeros if on_gpu else np.zeros
    times = mesh.everyone.from_first(
        lambda: layer_seconds(model, zeros(1, master_dtype(precision)))
    )
    return [LayerSeconds(*seconds) for seconds in times]
