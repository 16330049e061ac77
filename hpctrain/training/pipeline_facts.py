"""Facts of a pipeline for the start and the summary of a run: grid, stages, bubble, idle time."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from hpctrain.engines import Engine
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.pipeline.layer_times import SAMPLES
from hpctrain.parallel.timing.clock import StageCosts, run_clock
from hpctrain.parallel.timing.summary import describe_bubble


def describe_pipeline(mesh: Mesh, batch: int) -> str:
    """Return grid, schedule, stages, and the clock's verdict on the micro-batches."""
    replica: Any = mesh.pipeline
    schedule, plan = replica.schedule, replica.plan
    layers = ", ".join(map(str, plan.layer_counts))
    cut = "by measured times" if plan.layer_seconds else "times not measured, taken as equal"
    verdict = describe_bubble(schedule, plan.costs, batch // mesh.data.size)
    return (
        f"data {mesh.data.size} x pipe {mesh.pipe.size}, {schedule.name} with "
        f"{schedule.micro_batches} micro-batch{'es' * (schedule.micro_batches != 1)}, "
        f"stages of {layers} layers ({cut}): {verdict}"
    )


def summarize_pipeline(mesh: Mesh, engine: Engine) -> dict[str, Any]:
    """Return grid, schedule, stages, predicted and measured idle time; collective."""
    replica: Any = mesh.pipeline
    schedule, plan = replica.schedule, replica.plan
    wait_s, compute_s = replica.wait.seconds, engine.times.compute_s
    own_facts = [mesh.data.rank, mesh.pipe.rank, wait_s / max(compute_s + wait_s, 1e-9)]
    ranks = [json.loads(text) for text in mesh.everyone.gather(json.dumps(own_facts))]
    costs = _scale(plan.costs, replica.samples / SAMPLES)
    return {
        "data": mesh.data.size,
        "pipe": mesh.pipe.size,
        "schedule": schedule.name,
        "micro_batches": schedule.micro_batches,
        "layers": plan.layer_counts,
        "placement": list(plan.placement),
        "ranks": [rank[:2] for rank in ranks],
        "stage_s": asdict(costs) if plan.layer_seconds else None,
        "predicted_bubble": round(run_clock(schedule, plan.costs).bubble, 4),
        "measured_idle": round(sum(rank[2] for rank in ranks) / len(ranks), 4),
    }


def _scale(costs: StageCosts, factor: float) -> StageCosts:
    """Return the costs of micro-batches of `factor` times as many samples."""
    columns = {name: tuple(factor * s for s in seconds) for name, seconds in vars(costs).items()}
    return replace(costs, **columns)
