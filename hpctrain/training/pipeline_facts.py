"""Facts of a pipeline: its grid, stages, bubble and idle time, and the memory of its ranks by kind.

Memory is measured, and predicted from the schedule's lists:

parameters, gradients   planes of a rank's slots, with gaps; and copies of shared tensors
optimizer               its state for these slots; with `shard_optimizer` 1/data as much
tapes                   live tapes at the peak of a rank's list, times the bytes of a tape
messages                sent in a step, with their stamps; memory until the receiver has them
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from math import prod
from typing import Any

import numpy as np

from hpctrain.collectives.chunks import bounds
from hpctrain.core.xp import Array
from hpctrain.engines import Engine
from hpctrain.gradients.arena import make_arena
from hpctrain.optim.optimizer import BLOCK_ELEMENTS, planes
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.pipeline.layer_times import SAMPLES
from hpctrain.parallel.pipeline.replica import PipelineReplica
from hpctrain.parallel.pipeline.stage_link import message_bytes
from hpctrain.parallel.pipeline.tape_bytes import peak_bytes
from hpctrain.parallel.schedules.messages import outbound
from hpctrain.parallel.timing.clock import StageCosts, run_clock
from hpctrain.parallel.timing.summary import describe_bubble


def describe_pipeline(mesh: Mesh, batch: int) -> str:
    """Return grid, schedule, stages, and the clock's verdict on the micro-batches."""
    replica: Any = mesh.pipeline
    schedule, plan = replica.schedule, replica.plan
    layers_text = ", ".join(map(str, plan.layer_counts))
    cut_text = "by measured times" if plan.layer_seconds else "times not measured, taken as equal"
    bubble_text = describe_bubble(schedule, plan.costs, batch // mesh.data.size)
    return (
        f"data {mesh.data.size} x pipe {mesh.pipe.size}, {schedule.name} with "
        f"{schedule.micro_batches} micro-batch{'es' * (schedule.micro_batches != 1)}, "
        f"stages of {layers_text} layers ({cut_text}): {bubble_text}"
    )


def summarize_pipeline(mesh: Mesh, engine: Engine) -> dict[str, Any]:
    """Return grid, schedule, stages, predicted and measured idle time; collective."""
    replica: Any = mesh.pipeline
    schedule, plan = replica.schedule, replica.plan
    wait_s, compute_s = replica.wait.seconds, engine.times.compute_s
    own_facts = [mesh.data.rank, mesh.pipe.rank, wait_s / max(compute_s + wait_s, 1e-9)]
    facts_of_ranks = [json.loads(text) for text in mesh.everyone.gather(json.dumps(own_facts))]
    costs = _scale_costs(plan.costs, replica.samples / SAMPLES)
    return {
        "data": mesh.data.size,
        "pipe": mesh.pipe.size,
        "schedule": schedule.name,
        "micro_batches": schedule.micro_batches,
        "layers": plan.layer_counts,
        "placement": list(plan.placement),
        "ranks": [rank[:2] for rank in facts_of_ranks],
        "stage_s": asdict(costs) if plan.layer_seconds else None,
        "predicted_bubble": round(run_clock(schedule, plan.costs).bubble, 4),
        "measured_idle": round(sum(rank[2] for rank in facts_of_ranks) / len(facts_of_ranks), 4),
    }


def _scale_costs(costs: StageCosts, factor: float) -> StageCosts:
    """Return the costs of micro-batches of `factor` times as many samples."""
    scaled_columns = {
        name: tuple(factor * s for s in seconds) for name, seconds in vars(costs).items()
    }
    return replace(costs, **scaled_columns)


Bytes = dict[str, int]  #: by kind
MIB = 1 << 20


def memory_of_ranks(mesh: Mesh, engine: Engine, is_sharded: bool) -> dict[str, list[Bytes]]:
    """Return the bytes of each rank by kind, "measured" and "predicted"; collective."""
    own_bytes = [_measured_bytes(mesh, engine), _predicted_bytes(mesh, engine, is_sharded)]
    if engine.optimizer_state is None:
        for nbytes in own_bytes:
            del nbytes["optimizer"]
    bytes_of_ranks = [json.loads(text) for text in mesh.everyone.gather(json.dumps(own_bytes))]
    return {
        "measured": [rank[0] for rank in bytes_of_ranks],
        "predicted": [rank[1] for rank in bytes_of_ranks],
    }


def table_rows(memory: Mapping[str, list[Bytes]]) -> dict[str, str]:
    """Return a text per kind: the smallest and the largest rank, measured and predicted."""
    return {
        f"{kind} of a rank": ", ".join(
            f"{_range_text([rank[kind] for rank in ranks])} {source}"
            for source, ranks in memory.items()
        )
        for kind in memory["measured"][0]
    }


def _range_text(counts: list[int]) -> str:
    low, high = (f"{n / MIB:,.3g}" for n in (min(counts), max(counts)))
    return f"{low} MiB" if low == high else f"{low} to {high} MiB"


def _measured_bytes(mesh: Mesh, engine: Engine) -> Bytes:
    replica: Any = mesh.pipeline
    tapes = {stage: replica.samples * nbytes for stage, nbytes in replica.sample_bytes.items()}
    return {
        "parameters": replica.arena.param.nbytes + replica.copied_bytes,
        "gradients": replica.arena.grad.nbytes,
        "optimizer": sum(x.nbytes for x in _planes_of_state(engine)),
        "tapes": _peak_of_tapes(mesh, replica, tapes),
        "messages": replica.sent_bytes,
    }


def _predicted_bytes(mesh: Mesh, engine: Engine, is_sharded: bool) -> Bytes:
    replica: Any = mesh.pipeline
    samples, itemsize = replica.samples, replica.arena.param.itemsize
    # The elements of a plane of this rank's slots, from their shapes alone.
    shapes = {name: p.shape for name, p in replica.model.parameters.items()}
    owned_names = replica.plan.owned_names(replica.model, mesh.pipe.rank)

    def unallocated(length: int, dtype: Any) -> np.ndarray:
        return np.broadcast_to(np.zeros(1, dtype), length)

    arena = make_arena(shapes, replica.arena.param.dtype, zeros=unallocated, own=owned_names)
    length = int(arena.param.size)
    optimizer_length = length
    if is_sharded:
        offsets = bounds(length, mesh.data.size, BLOCK_ELEMENTS)
        optimizer_length = offsets[mesh.data.rank + 1] - offsets[mesh.data.rank]
    tapes = {s: samples * n for s, n in replica.predict_sample_bytes(samples).items()}
    return {
        "parameters": itemsize * (length + _copied_elements(mesh, replica)),
        "gradients": itemsize * length,
        "optimizer": itemsize * optimizer_length * len(_planes_of_state(engine)),
        "tapes": _peak_of_tapes(mesh, replica, tapes),
        "messages": _message_bytes(mesh, replica, samples * itemsize),
    }


def _planes_of_state(engine: Engine) -> list[Array]:
    """Return the planes of the optimizer's state, such as moments."""
    return list(planes(engine.optimizer_state or {}).values())


def _copied_elements(mesh: Mesh, replica: PipelineReplica) -> int:
    """Return the size of the tensors that this rank uses and another one owns."""
    own_stages, model = replica.plan.stages_of(mesh.pipe.rank), replica.model
    return sum(
        prod(model.parameters[name].shape)
        for name, owner, uses in replica.plan.shared_tensors(model)
        if owner not in own_stages and any(stage in own_stages for _, stage in uses)
    )


def _peak_of_tapes(mesh: Mesh, replica: PipelineReplica, tapes: Mapping[int, float]) -> int:
    assert replica.schedule is not None
    return peak_bytes(replica.schedule.actions[mesh.pipe.rank], tapes)


def _message_bytes(mesh: Mesh, replica: PipelineReplica, unit_bytes: int) -> int:
    """Return the bytes that this rank sends in a step; `unit_bytes`: of a number per sample."""
    assert replica.schedule is not None
    plan, model = replica.plan, replica.model
    return sum(
        message_bytes(unit_bytes * prod(plan.boundary_shape(model, message.boundary)))
        for _, message in outbound(replica.schedule, mesh.pipe.rank)
    )
