"""Options of `hpctrain bench predict`: from words to a machine, a step, and rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpctrain import data, nn
from hpctrain.bench import message_sizes, units
from hpctrain.bench.prediction import measurements as measurement_files
from hpctrain.bench.prediction import predict
from hpctrain.bench.training_step.profile import profile
from hpctrain.core.errors import UsageError
from hpctrain.cost_model.loggp import Cluster, Wire
from hpctrain.cost_model.training_step import Step, even_step
from hpctrain.engines import Task
from hpctrain.gradients.precision import master_dtype
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.training import recipe, runs

#: Defaults without a flag or a measurement.
LINK, LATENCY, NODE_LINK, NODE_LATENCY = "100Gbit", "2us", "10GB/s", "1us"
MEMORY = "100GB/s"
Words = Mapping[str, Any]


@dataclass(frozen=True)
class Prediction:
    """Predicted rows, their machine, and that machine in words."""

    rows: list[dict[str, Any]]
    machine: Cluster
    machine_text: str


def run(words: Words) -> Prediction:
    """Return the predictions for the options `words`; raise UsageError."""
    for option in ("ranks_per_node", "cards"):
        if words[option] < 1:
            name = option.replace("_", "-")
            raise UsageError(f"--{name}: expected 1 or more, seen {words[option]}")
    per_node = words["ranks_per_node"]
    layouts = [predict.RankLayout(ranks, per_node) for ranks in units.ranks(words["ranks"])]
    names, lengths = (
        predict.chosen(words["algorithms"], layouts),
        message_sizes.parse(words["sizes"]),
    )
    measurements = measurement_files.read(words["measured"]) if words["measured"] else None
    machine = _machine(words, measurements)
    step = _step(words) if words["step"] else None
    rows = list(predict.compare(measurements, machine)) if measurements else []
    rows += predict.allreduce_rows(machine, layouts, names, lengths)
    if step:
        rows += predict.step_rows(machine, layouts, names, step, words["mode"])
    return Prediction(rows, machine, _machine_text(machine, per_node))


def _machine(words: Words, measurements: measurement_files.Measurements | None) -> Cluster:
    """Return the machine: flags override measurements, and measurements override defaults."""
    fitted = measurements or measurement_files.Measurements([], 1)
    inside = _wire(words, "node_", fitted.inside, (NODE_LINK, NODE_LATENCY))
    between = _wire(words, "", fitted.between, (LINK, LATENCY))
    per_node, bandwidth = words["ranks_per_node"], words["memory_bandwidth"]
    memory = units.speed(bandwidth or MEMORY, "--memory-bandwidth")
    machine = predict.cluster(inside, between, memory, per_node, words["cards"])
    return machine if bandwidth or fitted.gamma is None else replace(machine, gamma=fitted.gamma)


def _wire(words: Words, prefix: str, fitted: Wire | None, default_options: tuple[str, str]) -> Wire:
    link, latency = words[f"{prefix}link"], words[f"{prefix}latency"]
    option = prefix.replace("_", "-")
    speed = units.speed(link or default_options[0], f"--{option}link")
    seconds = units.seconds(latency or default_options[1], f"--{option}latency")
    nominal = predict.wire(speed, seconds)
    if fitted is None:
        return nominal
    latency_wire = nominal if latency else fitted
    bandwidth_wire = nominal if link else fitted
    return replace(
        latency_wire,
        seconds_per_byte=bandwidth_wire.seconds_per_byte,
        seconds_per_byte_duplex=bandwidth_wire.seconds_per_byte_duplex,
    )


def _step(words: Words) -> Step:
    """Return the step of `--step`, measured here if it names a recipe."""
    bucket = message_sizes.parse(words["bucket"])[-1]
    compute, comma, nbytes = words["step"].partition(",")
    if comma:
        return even_step(units.seconds(compute, "--step"), message_sizes.parse(nbytes)[-1], bucket)
    return of_recipe(words["step"], bucket)


def of_recipe(name: str, bucket_bytes: int) -> Step:
    """Return one rank's computation in a step of recipe `name`, measured in this process."""
    spec = recipe.load(name)
    split = spec.data.load(spec.run.seed)
    dtype = master_dtype(spec.run.precision)
    replica = ModelReplica(runs.build_model(spec, split), spec.run.seed, dtype)
    replica.micro_batches = spec.batch.micro_batches
    sampler = data.Sampler(len(split.train), spec.batch.size(1), spec.run.seed)
    batch = Batch(*split.train.rows(sampler.batch_indexes(0)))
    task = Task(batch, 1 / len(batch.y), nn.Key(spec.run.seed, 0, 0))
    return profile(replica, spec.optimizer.build(lambda step: 0.0), task, bucket_bytes)


def _machine_text(machine: Cluster, per_node: int) -> str:
    """Return the machine in words."""
    between, inside = (
        f"{8e-9 / max(wire.seconds_per_byte, 1e-15):.4g} Gbit/s, "
        f"{1e6 * (wire.latency + 2 * wire.overhead):.3g} us"
        for wire in (machine.between, machine.inside)
    )
    return f"{per_node} ranks a node; between nodes {between}; in a node {inside}"
