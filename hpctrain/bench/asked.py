"""What `hpctrain bench predict` was asked for: from words to a machine, a step, and rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpctrain import data, nn, recipe, runs
from hpctrain.bench import measured, predict, quantities, sizes
from hpctrain.bench.profile import profile
from hpctrain.engines import Task
from hpctrain.errors import UsageError
from hpctrain.gradients.precision import master
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.tuning.loggp import Cluster, Wire
from hpctrain.tuning.steps import Step, even

#: What is taken where neither a flag nor a measurement says otherwise.
LINK, LATENCY, NODE_LINK, NODE_LATENCY = "100Gbit", "2us", "10GB/s", "1us"
MEMORY = "100GB/s"
Words = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """Rows, the machine that they are of, and that machine in words."""

    rows: list[dict[str, Any]]
    machine: Cluster
    said: str


def answer(words: Words) -> Answer:
    """Return what the options `words` ask for; raise UsageError."""
    for option in ("ranks_per_node", "cards"):
        if words[option] < 1:
            name = option.replace("_", "-")
            raise UsageError(f"--{name}: expected 1 or more, seen {words[option]}")
    per_node = words["ranks_per_node"]
    layouts = [predict.Layout(ranks, per_node) for ranks in quantities.ranks(words["ranks"])]
    names, lengths = predict.chosen(words["algorithms"], layouts), sizes.parse(words["sizes"])
    seen = measured.read(words["measured"]) if words["measured"] else None
    machine = _machine(words, seen)
    step = _step(words) if words["step"] else None
    rows = list(predict.compared(seen, machine)) if seen else []
    rows += predict.allreduce_rows(machine, layouts, names, lengths)
    if step:
        rows += predict.step_rows(machine, layouts, names, step, words["mode"])
    return Answer(rows, machine, _said(machine, per_node))


def _machine(words: Words, seen: measured.Measured | None) -> Cluster:
    """Return the machine: what flags say goes before what was measured, and that before guesses."""
    known = seen or measured.Measured([], 1)
    inside = _wire(words, "node_", known.inside, (NODE_LINK, NODE_LATENCY))
    between = _wire(words, "", known.between, (LINK, LATENCY))
    per_node, told = words["ranks_per_node"], words["memory_bandwidth"]
    memory = quantities.speed(told or MEMORY, "--memory-bandwidth")
    machine = predict.cluster(inside, between, memory, per_node, words["cards"])
    return machine if told or known.gamma is None else replace(machine, gamma=known.gamma)


def _wire(words: Words, where: str, found: Wire | None, guess: tuple[str, str]) -> Wire:
    link, latency = words[f"{where}link"], words[f"{where}latency"]
    option = where.replace("_", "-")
    speed = quantities.speed(link or guess[0], f"--{option}link")
    seconds = quantities.seconds(latency or guess[1], f"--{option}latency")
    said = predict.wire(speed, seconds)
    if found is None:
        return said
    short = said if latency else found
    long = said if link else found
    return replace(short, per_byte=long.per_byte, both_ways=long.both_ways)


def _step(words: Words) -> Step:
    """Return the step that `--step` describes, measured here if it is a recipe's."""
    bucket = sizes.parse(words["bucket"])[-1]
    compute, comma, nbytes = words["step"].partition(",")
    if comma:
        return even(quantities.seconds(compute, "--step"), sizes.parse(nbytes)[-1], bucket)
    return of_recipe(words["step"], bucket)


def of_recipe(name: str, bucket_bytes: int) -> Step:
    """Return what one step of recipe `name` computes on one rank, measured in this process."""
    spec = recipe.load(name)
    split = spec.data.load(spec.run.seed)
    replica = ModelReplica(runs.build_model(spec, split), spec.run.seed, master(spec.run.precision))
    replica.micro_batches = spec.batch.micro_batches
    sampler = data.Sampler(len(split.train), spec.batch.size(1), spec.run.seed)
    batch = Batch(*split.train.rows(sampler.batch_indexes(0)))
    task = Task(batch, 1 / len(batch.y), nn.Key(spec.run.seed, 0, 0))
    return profile(replica, spec.optimizer.build(lambda step: 0.0), task, bucket_bytes)


def _said(machine: Cluster, per_node: int) -> str:
    """Return the machine in words."""
    between, inside = (
        f"{8e-9 / max(wire.per_byte, 1e-15):.4g} Gbit/s, "
        f"{1e6 * (wire.latency + 2 * wire.overhead):.3g} us"
        for wire in (machine.between, machine.inside)
    )
    return f"{per_node} ranks a node; between nodes {between}; in a node {inside}"
