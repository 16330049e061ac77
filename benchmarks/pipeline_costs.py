"""Claims: a pipeline of one stage costs <= 1 % of a 10 ms step, an action <= 15 us on Open MPI and
<= 40 us on MPICH, its messages included; the measured cut of pylm is within 3 % of the best one;
six predictions of 16,384 ranks take <= 60 s.

    python benchmarks/pipeline_costs.py actions|alone|balance|predict [--rounds 200]

actions   2 ranks, messages of 32 KiB, operations that return an array that exists: the executor.
          `interleaved` is reported only: on 2 ranks each of its actions receives and sends
alone     the steps of a ModelReplica and of a PipelineReplica with one stage, equal micro-batches,
          in turn: the median of the paired ratios
balance   cuts by repeated measurements of the layers; the slowest stage by the median costs of all
          measurements, compared with the best of all cuts
predict   a model of 13 B parameters on 2,048 pipelines of 8 ranks, three schedules, weak and strong
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from functools import partial
from itertools import combinations, pairwise
from time import perf_counter
from typing import Any

import numpy as np
from lib.common import median_ratio, report_result, start_world, summarize_times, time_interleaved
from lib.pipelines import KEY, Row, conditions, pipe_mesh, pylm_model, texts

from hpctrain.core.allocator import keep_freed_memory
from hpctrain.gradients.replica import ModelReplica, ignore_ready
from hpctrain.parallel.pipeline import stages
from hpctrain.parallel.pipeline.execution import Program, route, run_actions
from hpctrain.parallel.pipeline.layer_times import layer_seconds
from hpctrain.parallel.pipeline.replica import PipelineReplica
from hpctrain.parallel.pipeline.stage_link import StageLink
from hpctrain.parallel.pipeline.stages import StagePlan
from hpctrain.parallel.schedules import make
from hpctrain.parallel.schedules.messages import inbound
from hpctrain.parallel.timing.clock import uniform_costs
from hpctrain.parallel.timing.predict import Grid, predict_step
from hpctrain.tuning.model.loggp import Cluster, Wire
from hpctrain.world import World

KIB = 1 << 10
MICRO_BATCHES, MESSAGE_BYTES = 64, 32 * KIB
MAX_ACTION_US = {"Open MPI": 15, "MPICH": 40}
PREDICTED = ("1f1b", "zb-h1", "zb-v")
PARAMETERS, PIPE, DATA = 13e9, 8, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("study", choices=STUDIES, nargs="?", default="actions")
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    world = start_world(2 if options.study == "actions" else 1)
    about = conditions(world)
    machine = about.pop("machine")
    rows, claims = STUDIES[options.study](world, options.rounds, machine["mpi"])
    report_result(world, f"pipeline-{options.study}", rows, claims, **about)


def measure_actions(world: World, rounds: int, mpi: str) -> tuple[list[Row], dict[str, bool]]:
    """Return rows of the executor with operations that do nothing."""
    steps = {name: empty_step(world, name) for name in ("gpipe", "1f1b", "zb-h1", "interleaved")}
    seconds = time_interleaved(world.link, {k: v for k, (v, _) in steps.items()}, rounds, calls=2)
    rows = []
    for name, times in seconds.items():
        us = 1e6 * np.array(times) / steps[name][1]
        median, fastest = float(np.median(us)), float(us.min())
        rows.append({"schedule": name, "actions": steps[name][1], "us_per_action": median,
                     "fastest_us": fastest, **summarize_times(times)})  # fmt: skip
    limit = MAX_ACTION_US[mpi.rsplit(maxsplit=1)[0]]
    claims = {
        f"{row['schedule']}: {row['us_per_action']:.1f} us per action, <= {limit}": (
            row["us_per_action"] <= limit
        )
        for row in rows
        if row["schedule"] != "interleaved"
    }
    return rows, claims


def empty_step(world: World, name: str) -> tuple[Any, int]:
    """Return a step whose operations do nothing, and the number of this rank's actions."""
    schedule = make(name, world.size, MICRO_BATCHES)
    keep_freed_memory()  # as processes that train do
    link, x = world.threads.link_for("stages"), np.zeros((MESSAGE_BYTES // 4,), np.float32)
    operations = {op: lambda action, _: x for op in "FBI"} | {"W": lambda action, _: None}
    rank = world.rank
    program = Program(rank, route(schedule, rank), inbound(schedule, rank))

    def step() -> None:
        stage_link = StageLink(link, program.arrivals, lambda message: x.shape, x)
        run_actions(program, operations, stage_link, world.trace, nullcontext)
        stage_link.close()

    return step, len(program.actions)


def measure_alone(world: World, rounds: int, mpi: str) -> tuple[list[Row], dict[str, bool]]:
    """Return rows of a whole replica, and of a pipeline with one stage; both with micro-batches."""
    keep_freed_memory()  # as processes that train do
    rows, claims = [], {}
    model, mesh = pylm_model(layers=2, width=32, length=64), pipe_mesh(world)
    for micro_batches in (1, 4):
        batch = texts(16, 64)
        whole = ModelReplica(model, 0, "float32")
        plan = StagePlan((0, len(model.layers)), (0,))
        split = PipelineReplica(model, 0, "float32", False, mesh.pipe, mesh.stages, plan, "1f1b")
        whole.micro_batches = split.micro_batches = micro_batches
        rivals = {
            name: partial(replica.gradient, batch, 1 / batch.n, KEY, ignore_ready)
            for name, replica in {"ModelReplica": whole, "PipelineReplica": split}.items()
        }
        seconds = time_interleaved(world.link, rivals, rounds)
        assert np.array_equal(whole.arena.grad, split.arena.grad)
        ratio = median_ratio(seconds["PipelineReplica"], seconds["ModelReplica"])
        rows += [{"replica": name, "micro": micro_batches, **summarize_times(times), "ratio": ratio}
                 for name, times in seconds.items()]  # fmt: skip
        claims[f"one stage, {micro_batches} micro-batches: {ratio:.4f} of a ModelReplica's step of "
               f"{rows[-2]['median_s'] * 1e3:.1f} ms, <= 1.01"] = ratio <= 1.01  # fmt: skip
    return rows, claims


def measure_balance(world: World, rounds: int, mpi: str) -> tuple[list[Row], dict[str, bool]]:
    """Return the cuts of pylm by each of several measurements."""
    model, zeros = pylm_model(), np.zeros(1, np.float32)
    rounds = min(rounds, 15)
    seconds = np.array([layer_seconds(model, zeros) for _ in range(rounds)])
    costs = np.median(seconds, 0)
    spread = np.percentile(seconds, 95, 0) / np.percentile(seconds, 5, 0)
    rows: list[Row] = [
        {"layer": name, "median_s": float(cost), "p95_to_p5": float(ratio)}
        for name, cost, ratio in zip(model.layers, costs, spread, strict=True)
    ]
    claims = {}
    for count in (2, 3, 4):
        best = min(slowest(costs, bounds) for bounds in possible_cuts(model, count))
        ratios = []
        for measured in seconds:
            plan = stages.plan_by_costs(model, list(measured), tuple(range(count)))
            ratios.append(slowest(costs, plan.bounds) / best)
        median_plan = stages.plan_by_costs(model, list(costs), tuple(range(count)))
        even = stages.plan_by_costs(model, stages.parameter_counts(model), tuple(range(count)))
        rows.append({"stages": count, "bounds": median_plan.bounds, "best_s": best,
                     "by_median": slowest(costs, median_plan.bounds) / best,
                     "worst": max(ratios), "ideal": float(costs.sum()) / count / best,
                     "even": slowest(costs, even.bounds) / best})  # fmt: skip
        claims[f"{count} stages: the slowest takes at worst {max(ratios):.3f} of the best cut's in "
               f"{rounds} measurements, <= 1.03"] = max(ratios) <= 1.03  # fmt: skip
    return rows, claims


def possible_cuts(model: Any, count: int) -> list[tuple[int, ...]]:
    """Return the bounds of all cuts into `count` stages that begin with a declaring layer."""
    starts = sorted({layers[0] for layers in model.uses.values()} - {0})
    return [(0, *inner, len(model.layers)) for inner in combinations(starts, count - 1)]


def slowest(costs: np.ndarray, bounds: tuple[int, ...]) -> float:
    return float(max(costs[a:b].sum() for a, b in pairwise(bounds)))


def measure_predictions(world: World, rounds: int, mpi: str) -> tuple[list[Row], dict[str, bool]]:
    """Return predictions with assumed hardware: 400 TFLOP/s, 50 GB/s and 3 us between nodes."""
    wire = Wire(3e-6, 1e-6, 1e-6, 1 / 50e9)
    grid = Grid(Cluster(wire, wire, 1e-12, 1e-12), DATA)
    micro_seconds = 2 * PARAMETERS / PIPE * 2048 / 400e12  # of a text of 2,048 tokens
    rows, begin = [], perf_counter()
    for samples, micro_batches in (("weak", 128), ("strong", 16)):
        for name in PREDICTED:
            start = perf_counter()
            schedule = make(name, PIPE, micro_batches)
            costs = uniform_costs(schedule, micro_seconds, micro_seconds, micro_seconds)
            nbytes = [int(2 * PARAMETERS / schedule.stages)] * schedule.stages
            step = predict_step(schedule, costs, grid, 2 * 2048 * 5120, nbytes)
            rows.append({"schedule": name, "samples": samples, "micro": micro_batches,
                         "ranks": step.ranks, "step_s": step.step, "efficiency": step.efficiency,
                         "took_s": perf_counter() - start})  # fmt: skip
    total = perf_counter() - begin
    return rows, {f"{len(rows)} predictions of 16,384 ranks took {total:.1f} s, <= 60": total <= 60}


STUDIES = {
    "actions": measure_actions,
    "alone": measure_alone,
    "balance": measure_balance,
    "predict": measure_predictions,
}

if __name__ == "__main__":
    main()
