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


MIB = 1 << 20
KINDS = ("parameters", "gradients", "optimizer", "tapes", "messages")


def memory_of_ranks(mesh: Mesh, engine: Engine) -> dict[str, list[dict[str, int]]]:
    """Return the bytes of each rank by kind, "measured" and "predicted"; collective."""
    assert mesh.pipeline is not None
    memory = mesh.pipeline.memory()
    memory |= engine.memory(memory["gradients"].predicted)
    own_bytes = [{kind: memory[kind][i] for kind in KINDS if kind in memory} for i in range(2)]
    bytes_of_ranks = [json.loads(text) for text in mesh.everyone.gather(json.dumps(own_bytes))]
    return {
        "measured": [rank[0] for rank in bytes_of_ranks],
        "predicted": [rank[1] for rank in bytes_of_ranks],
    }


def table_rows(memory: Mapping[str, list[dict[str, int]]]) -> dict[str, str]:
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
