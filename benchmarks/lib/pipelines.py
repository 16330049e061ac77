"""Models, replicas and clocks that the benchmarks of pipelines share."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter, process_time, sleep
from typing import Any

import numpy as np

from hpctrain import nn
from hpctrain.gradients.replica import Batch, ignore_ready, split_batch
from hpctrain.nn.layer import Parameter, run_now
from hpctrain.nn.part import GradientSums
from hpctrain.parallel.mesh import Mesh, make_mesh
from hpctrain.parallel.options import MeshOptions, PipelineOptions
from hpctrain.parallel.pipeline.build import make_pipeline
from hpctrain.parallel.pipeline.execution import MicroBatch, TrainingStep
from hpctrain.parallel.pipeline.replica import PipelineReplica
from hpctrain.parallel.schedules import make
from hpctrain.parallel.timing.clock import FREE_WIRE, StageCosts, run_clock
from hpctrain.world import World
from lib.common import machine_facts, summarize_times

KEY = nn.Key(seed=0, step=0, first=0)
LENGTH, WIDTH = 128, 256  #: of pylm, hpctrain/training/recipes/pylm.toml
Row = dict[str, Any]
Times = dict[tuple[str, int], list[float]]  #: seconds by operation and stage


@dataclass(frozen=True)
class SleepingLayer:
    """A layer that sleeps in place of computing: a stage whose costs are known."""

    forward_s: float
    input_s: float  #: gradient of the input
    weight_s: float  #: gradient of the parameter, handed to `later`
    is_last: bool = False  #: its output is one number, so that the loss takes no time

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (1,) if self.is_last else shape

    def parameters(self, shape: tuple[int, ...]) -> dict[str, Parameter]:
        return {"w": Parameter((1,), lambda _, shape: np.zeros(shape))}

    def forward(self, p: Mapping[str, Any], x: Any, key: Any) -> tuple[Any, Any]:
        sleep_for(self.forward_s)
        return (x.reshape(len(x), -1)[:, :1] if self.is_last else x), x

    def backward(self, p: Any, g: Any, saved: Any, dy: Any, want_dx: bool, later: Any = run_now):
        sleep_for(self.input_s)
        later(partial(self._weight_gradient, g))
        return saved if self.is_last else dy

    def _weight_gradient(self, g: Mapping[str, Any]) -> None:
        sleep_for(self.weight_s)
        g["w"][...] = 0


def sleep_for(seconds: float) -> None:
    if seconds:
        sleep(seconds)


def sleeping_model(
    stages: int, unit_s: float | tuple[float, float, float], shape: tuple[int, ...]
) -> nn.Model:
    """Return a model of one layer per stage, each with F, I and W of `unit_s` seconds."""
    costs = (unit_s,) * 3 if isinstance(unit_s, float) else unit_s
    layers = [SleepingLayer(*costs, is_last=stage + 1 == stages) for stage in range(stages)]
    return nn.Model(layers, shape, "mean_squared_error")


def pylm_model(layers: int = 4, width: int = WIDTH, length: int = LENGTH) -> nn.Model:
    """Return the model of the recipe pylm, or one of other sizes."""
    return nn.TransformerOptions(layers=layers, width=width, heads=4, length=length).build(
        None, None
    )


def texts(samples: int, length: int = LENGTH) -> Batch:
    """Return `samples` random texts and their next bytes."""
    rows = np.random.default_rng(0).integers(0, 256, (samples, length + 1)).astype(np.uint8)
    return Batch.of(rows[:, :-1], rows[:, 1:].astype(np.int64))


def make_replica(
    mesh: Mesh, model: nn.Model, schedule: str, micro_batches: int, balance: Any = "measured"
) -> PipelineReplica:
    """Return this rank's part of a replica of `model`."""
    options = PipelineOptions(schedule=schedule, balance=balance)
    replica = make_pipeline(model, 0, "float32", False, mesh, options)
    replica.micro_batches = micro_batches
    return replica


def sleeping_step(
    mesh: Mesh, schedule: str, micro_batches: int, unit_s: float, shape: tuple[int, ...] = (1,)
) -> Any:
    """Return a call that makes a step of equal stages, with samples of `shape`.

    A rank sleeps `unit_s` in all for F of a micro-batch, and as long for I and for W.
    """
    pipe = mesh.pipe.size
    stages = make(schedule, pipe, micro_batches).stages
    model = sleeping_model(stages, unit_s * pipe / stages, shape)
    replica = make_replica(mesh, model, schedule, micro_batches, [1] * stages)
    x = np.zeros((micro_batches, *shape), np.float32)
    batch = Batch.of(x, np.zeros((micro_batches, 1), np.float32))
    return partial(replica.gradient, batch, 1.0, KEY, ignore_ready)


def pipe_mesh(world: World) -> Mesh:
    """Return the mesh whose pipe axis has all ranks."""
    return make_mesh(world, MeshOptions(pipe=world.size))


def action_times(replica: PipelineReplica, batch: Batch) -> Times:
    """Return the seconds of this rank's actions, run without messages, on random inputs."""
    schedule, plan, model = replica.schedule, replica.plan, replica.model
    pieces = [
        MicroBatch(piece, KEY._replace(first=first))
        for piece, first in split_batch(batch, schedule.micro_batches)
    ]
    parts, grads, params = replica._parts, replica._grads, replica._params
    sums = {s: GradientSums(p, grads, len(pieces), ignore_ready) for s, p in parts.items()}
    memory = replica.arena.param
    step = TrainingStep(model, parts, params, sums, pieces, 1.0, memory)
    times: Times = {}
    for action in schedule.actions[replica._pipe.rank]:
        op, stage, micro = action
        x = None
        if (op == "F" and stage > 0) or (op in "BI" and stage + 1 < plan.stages):
            boundary = stage - 1 if op == "F" else stage
            x = inputs(pieces[micro].batch.n, plan.boundary_shape(model, boundary))
        start = perf_counter()
        step.operations[op](action, x)
        times.setdefault((op, stage), []).append(perf_counter() - start)
    return times


def inputs(samples: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((samples, *shape), np.float32)


def stage_costs(world: World, times: Times, stages: int) -> StageCosts:
    """Return the median seconds of each operation of each stage; collective over `world`."""
    own = {f"{op} {stage}": float(np.median(x)) for (op, stage), x in times.items()}
    medians: dict[str, float] = {}
    for part in world.gather(json.dumps(own)):
        medians |= json.loads(part)
    columns = [[medians.get(f"{op} {s}", 0.0) for s in range(stages)] for op in "FIWB"]
    forward, input_, weight, both = columns
    return StageCosts(
        tuple(forward), tuple(max(*x) for x in zip(input_, both, strict=True)), tuple(weight)
    )


def message_sizes(replica: PipelineReplica, samples: int) -> list[int]:
    """Return the bytes of a micro-batch of `samples` at each boundary."""
    plan, model = replica.plan, replica.model
    return [
        4 * samples * int(np.prod(plan.boundary_shape(model, i))) for i in range(plan.stages - 1)
    ]


def clock_seconds(
    replica: PipelineReplica, costs: StageCosts, samples: int, wire: Any = FREE_WIRE
) -> float:
    """Return the step of the clock for measured costs."""
    sizes = message_sizes(replica, samples)
    return run_clock(replica.schedule, costs, wire, sizes).makespan


def compared(seconds: Sequence[float], clocks: Sequence[float], **about: Any) -> Row:
    """Return the row of measured steps beside the clock's; one of it, or one per step."""
    ratios = np.array(seconds) / np.array(clocks)
    spread = {"fastest_to_clock": float(ratios.min()), "slowest_to_clock": float(ratios.max())}
    return {**about, "clock_s": float(np.median(clocks)), **summarize_times(seconds),
            "to_clock": float(np.median(ratios)), **spread}  # fmt: skip


class CoreShare:
    """The processor time of this rank in a block, divided by the time of the block."""

    def __enter__(self) -> CoreShare:
        self._cpu_s, self._start = process_time(), perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.value = (process_time() - self._cpu_s) / (perf_counter() - self._start)


def min_over_ranks(world: World, value: float) -> float:
    return min(map(float, world.gather(repr(value))))


def conditions(world: World) -> dict[str, Any]:
    """Return the facts of the machine, and the load that others left on it at the begin."""
    return {"machine": machine_facts(world), "load_average_at_begin": os.getloadavg()[0]}
