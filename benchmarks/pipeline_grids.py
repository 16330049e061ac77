"""Reported: steps of pylm on 4 ranks as 4 replicas, 2 pipelines of 2 ranks, and 1 pipeline of 4.

    python benchmarks/pipeline_grids.py                  4 ranks on the cores of this machine
    python benchmarks/pipeline_grids.py --link 1gbit     on 4 hosts made by `hpctrain netlab`

All grids train on the same texts of a step, 16 or 64, in micro-batches of at most 4, with the
engine `allreduce` and AdamW; the whole step is measured, in turn. The claim is that each step was
taken, not that a grid is faster.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from typing import Any

import numpy as np
from lib.common import report_result, start_world, summarize_times, time_interleaved
from lib.pipelines import KEY, LENGTH, Row, conditions, pylm_model, texts

from hpctrain import optim
from hpctrain.cluster.netlab.netlab import Lab, netlab, parse_speed
from hpctrain.core import launchers
from hpctrain.engines import AllReduce, Flags, Task
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.options import MeshOptions, PipelineOptions
from hpctrain.training.split_model import make_replica
from hpctrain.world import World

RANKS, MICRO_TEXTS = 4, 4
GRIDS = {"4 x 1": (1, "1f1b"), "2 x 2": (2, "1f1b"), "2 x 2, zb-h1": (2, "zb-h1"),
         "1 x 4": (4, "1f1b"), "1 x 4, zb-h1": (4, "zb-h1")}  # fmt: skip
BATCHES = (16, 64)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--link", help="of 4 hosts; none: this machine")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # 4 ranks share the cores of this machine
    if options.link and launchers.launched(os.environ).size == 1:
        return netlab(Lab(RANKS, 1, parse_speed(options.link)), [sys.executable, *sys.argv])
    world = start_world(RANKS)
    about = conditions(world)
    rows = [row for batch in BATCHES for row in measure(world, batch, options.rounds)]
    claims = {"all steps were taken": not any(row["failed"] for row in rows)}
    place = f"hosts-{options.link}" if options.link else "here"
    about.pop("machine")
    report_result(world, f"pipeline-grids-{place}", rows, claims, **about)
    return 0


def measure(world: World, batch: int, rounds: int) -> list[Row]:
    """Return a row per grid: the same texts of a step on each."""
    engines = {name: make_engine(world, *grid) for name, grid in GRIDS.items()}
    failed: dict[str, int] = {}
    steps = {
        name: partial(make_step, engine, mesh, batch, failed, name)
        for name, (mesh, engine) in engines.items()
    }
    seconds = time_interleaved(world.link, steps, rounds, warm_up=1)
    plain = seconds["4 x 1"]
    rows = []
    for name, times in seconds.items():
        _, engine = engines[name]
        rows.append({
            "grid": name, "texts": batch, "micro": engine.replica.micro_batches,
            **summarize_times(times), "failed": failed[name],
            "to_data_axis_alone": float(np.median(np.array(times) / np.array(plain))),
        })  # fmt: skip
        engine.close()
    return rows


def make_engine(world: World, pipe: int, schedule: str) -> tuple[Mesh, Any]:
    """Return the mesh, and an engine with its own model."""
    pipeline = PipelineOptions(schedule=schedule) if pipe > 1 else PipelineOptions()
    mesh, replica = make_replica(
        pylm_model(), 0, "float32", world, mesh=MeshOptions(pipe=pipe), pipeline=pipeline
    )
    return mesh, AllReduce().build(mesh.data, replica, optim.adamw(1e-6))


def make_step(engine: Any, mesh: Mesh, batch: int, failed: dict[str, int], name: str) -> None:
    """Make a step on this worker's share of `batch` texts."""
    share = batch // mesh.data.size
    engine.replica.micro_batches = share // MICRO_TEXTS
    first = share * mesh.data.rank
    samples = texts(batch).part(first, first + share)
    key = KEY._replace(first=first, samples=batch)
    _, flags = engine.step(Task(samples, 1 / (batch * LENGTH), key), Flags())
    failed[name] = failed.get(name, 0) + flags.failed


if __name__ == "__main__":
    sys.exit(main())
