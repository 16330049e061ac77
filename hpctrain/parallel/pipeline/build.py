"""A pipeline from a model and options: the cut into stages, the ranks, the replica."""

from __future__ import annotations

import json
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
from hpctrain.parallel.pipeline.layer_times import layer_seconds
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
    plan = everyone.on_all_ranks(lambda: _plan(model, precision, on_gpu, mesh, options))
    if on_gpu:
        xp.allow_tf32(precision == "tf32")
    else:
        keep_freed_memory()
    dtype = master_dtype(precision)
    return PipelineReplica(model, seed, dtype, on_gpu, mesh.pipe, mesh.grid, plan, options.schedule)


def _plan(
    model: nn.Model, precision: Precision, on_gpu: bool, mesh: Mesh, options: PipelineOptions
) -> StagePlan:
    """Return the stages by `options`; rank 0 measures for all."""
    stages.require_splittable(model)
    ranks = mesh.pipe.size
    placement = make(options.schedule, ranks, 2 * ranks, options.stages_per_rank).placement
    if not isinstance(options.balance, str):
        return stages.plan_by_hand(model, options.balance, placement)
    stages.require_stages(model, len(placement))
    costs: Sequence[float] = stages.parameter_counts(model)
    if options.balance == "measured":
        costs = _measured_costs(model, precision, on_gpu, mesh)
    return stages.plan_by_costs(model, costs, placement)


def _measured_costs(model: nn.Model, precision: Precision, on_gpu: bool, mesh: Mesh) -> list[float]:
    """Return the seconds of each layer on rank 0; collective."""
    own_costs: list[float] = []
    if mesh.everyone.rank == 0:
        zeros = xp.zeros if on_gpu else np.zeros
        own_costs = layer_seconds(model, zeros(1, master_dtype(precision)))
    costs: list[float] = json.loads(mesh.everyone.gather(json.dumps(own_costs))[0])
    return costs
