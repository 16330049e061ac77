"""`hpctrain bench predict`: from options to a machine, a training step and predicted rows.

The step of a recipe is profiled in this process: until each bucket is full, and the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from hpctrain import data, nn
from hpctrain.core.errors import UsageError
from hpctrain.engines import Task
from hpctrain.gradients import buckets
from hpctrain.gradients.buckets import Bucket
from hpctrain.gradients.precision import make_reading_replica
from hpctrain.gradients.replica import Batch, Replica
from hpctrain.optim import Optimizer
from hpctrain.tools.bench import units
from hpctrain.tools.bench.prediction import measurements as measurement_files
from hpctrain.tools.bench.prediction import predict
from hpctrain.training import recipe, runs
from hpctrain.tuning.model.loggp import Cluster, Wire
from hpctrain.tuning.model.training_step import Step, uniform_step

#: Defaults of options that are neither given nor measured.
DEFAULT_LINK, DEFAULT_LATENCY, DEFAULT_NODE_LINK, DEFAULT_NODE_LATENCY = (
    "100Gbit",
    "2us",
    "10GB/s",
    "1us",
)
DEFAULT_MEMORY_BANDWIDTH = "100GB/s"


def run(options: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Cluster, str]:
    """Return the rows for the command line's `options`, the machine, and its description.

    Raises UsageError.
    """
    check_counts(options)
    ranks_per_node = options["ranks_per_node"]
    layouts = [
        predict.RankLayout(ranks, ranks_per_node) for ranks in units.parse_counts(options["ranks"])
    ]
    algorithms, sizes = (
        predict.choose_algorithms(options["algorithms"], layouts),
        units.parse_sizes(options["sizes"]),
    )
    measurements = (
        measurement_files.read_measurements(options["measured"]) if options["measured"] else None
    )
    machine = make_machine(options, measurements)
    step = _make_step(options) if options["step"] else None
    rows = list(predict.compare_measurements(measurements, machine)) if measurements else []
    rows += predict.allreduce_rows(machine, layouts, algorithms, sizes)
    if step:
        rows += predict.step_rows(machine, layouts, algorithms, step, options["mode"])
    return rows, machine, machine_text(machine, ranks_per_node)


def check_counts(
    options: Mapping[str, Any], option_names: Sequence[str] = ("ranks_per_node", "cards")
) -> None:
    """Raise UsageError for an option of `option_names` that is below 1; None has a default."""
    for name in option_names:
        if options[name] is not None and options[name] < 1:
            option = name.replace("_", "-")
            raise UsageError(f"--{option}: expected 1 or more, seen {options[name]}")


def make_machine(
    options: Mapping[str, Any], measurements: measurement_files.Measurements | None = None
) -> Cluster:
    """Return the machine: options override measurements, and measurements override defaults."""
    fitted_machine = measurements or measurement_files.Measurements([], 1)
    node_wire = _make_wire(
        options, "node_", fitted_machine.inside, (DEFAULT_NODE_LINK, DEFAULT_NODE_LATENCY)
    )
    network_wire = _make_wire(options, "", fitted_machine.between, (DEFAULT_LINK, DEFAULT_LATENCY))
    ranks_per_node, bandwidth_text = options["ranks_per_node"], options["memory_bandwidth"]
    memory_bytes_per_s = units.parse_speed(
        bandwidth_text or DEFAULT_MEMORY_BANDWIDTH, "--memory-bandwidth"
    )
    machine = predict.make_cluster(
        node_wire, network_wire, memory_bytes_per_s, ranks_per_node, options["cards"]
    )
    return (
        machine
        if bandwidth_text or fitted_machine.gamma is None
        else replace(machine, gamma=fitted_machine.gamma)
    )


def _make_wire(
    options: Mapping[str, Any], prefix: str, fitted_wire: Wire | None, defaults: tuple[str, str]
) -> Wire:
    link_text, latency_text = options[f"{prefix}link"], options[f"{prefix}latency"]
    option_prefix = prefix.replace("_", "-")
    bytes_per_s = units.parse_speed(link_text or defaults[0], f"--{option_prefix}link")
    latency_s = units.parse_seconds(latency_text or defaults[1], f"--{option_prefix}latency")
    nominal_wire = predict.make_wire(bytes_per_s, latency_s)
    if fitted_wire is None:
        return nominal_wire
    latency_wire = nominal_wire if latency_text else fitted_wire
    bandwidth_wire = nominal_wire if link_text else fitted_wire
    return replace(
        latency_wire,
        seconds_per_byte=bandwidth_wire.seconds_per_byte,
        seconds_per_byte_duplex=bandwidth_wire.seconds_per_byte_duplex,
    )


def _make_step(options: Mapping[str, Any]) -> Step:
    """Return the step of `--step`; if it names a recipe, measure the step in this process."""
    bucket = units.parse_sizes(options["bucket"])[-1]
    compute_text, separator, gradient_text = options["step"].partition(",")
    if separator:
        return uniform_step(
            units.parse_seconds(compute_text, "--step"),
            units.parse_sizes(gradient_text)[-1],
            bucket,
        )
    spec = recipe.load(options["step"])
    split = spec.data.load(spec.run.seed)
    model = runs.build_model(spec, split)
    replica = make_reading_replica(model, spec.run.seed, spec.run.precision, on_gpu=False)
    replica.micro_batches = spec.batch.micro_batches
    sampler = data.Sampler(len(split.train), spec.batch.size(1), spec.run.seed)
    batch = Batch.of(*split.train.rows(sampler.batch_indexes(0)))
    task = Task(batch, 1 / batch.n, nn.Key(spec.run.seed, 0, 0))
    return profile_step(replica, spec.optimizer.build(lambda step: 0.0), task, bucket)


def machine_text(machine: Cluster, ranks_per_node: int) -> str:
    """Return the machine in words."""
    network_wire, node_wire = (
        f"{8e-9 / max(wire.seconds_per_byte, 1e-15):.4g} Gbit/s, "
        f"{1e6 * (wire.latency + 2 * wire.overhead):.3g} us"
        for wire in (machine.between, machine.inside)
    )
    ranks = f"{ranks_per_node} rank{'s' * (ranks_per_node != 1)}"
    return f"{ranks} a node; between nodes {network_wire}; in a node {node_wire}"


def profile_step(
    replica: Replica,
    optimizer: Optimizer,
    task: Task,
    bucket_bytes: int,
    rounds: int = 7,
    warm_up: int = 2,
) -> Step:
    """Return the median times of `rounds` steps without communication; trains the model."""
    arena = replica.arena
    bucket_list = buckets.cut_buckets(
        arena.slots, arena.grad.size, arena.grad.itemsize, bucket_bytes
    )
    optimizer_state, round_times = optimizer.init(arena.param), []
    for _ in range(warm_up + rounds):
        full_times = _bucket_times(replica, task, bucket_list)
        start = perf_counter()
        arrays = arena.grad, optimizer_state, arena.param
        optimizer.update(*arrays, arena.layout, arena.gather_rows)
        round_times.append([*full_times, perf_counter() - start])
    *full_times, update_s = np.median(round_times[warm_up:], axis=0).tolist()
    bucket_bytes_list = (
        float((bucket.stop - bucket.start) * arena.grad.itemsize) for bucket in bucket_list
    )
    return Step(tuple(full_times), tuple(bucket_bytes_list), update_s)


def _bucket_times(replica: Replica, task: Task, bucket_list: list[Bucket]) -> list[float]:
    """Compute one gradient; return the seconds until each bucket and all before it are full."""
    times_by_name: dict[str, float] = {}
    start = perf_counter()
    replica.gradient(
        task.batch, task.scale, task.key, lambda name: times_by_name.update({name: perf_counter()})
    )
    times_by_name[""] = perf_counter()  # the end of backward counts for the last bucket
    slots_by_bucket = [*(bucket.names for bucket in bucket_list[:-1]), bucket_list[-1].names | {""}]
    full_times = [
        max(times_by_name[name] for name in slot_names) - start for slot_names in slots_by_bucket
    ]
    return np.maximum.accumulate(full_times).tolist()
