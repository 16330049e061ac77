"""Predict all-reduces and training steps on machines that you do not have.

A machine has two kinds of wires, seconds per byte added and a memory bandwidth. They come from
options, measurements (`measurements.py`) or defaults. Each row is marked *measured* or *predicted*.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.tools.bench.prediction.measurements import Measurements
from hpctrain.tuning.model.loggp import Clocks, Cluster, Wire
from hpctrain.tuning.model.message_schedules import SCHEDULES
from hpctrain.tuning.model.training_step import Step, step_time

Row = dict[str, Any]
LAYOUT_REQUIREMENTS = {
    "direct": "works in one node's memory; expected --ranks from 2 up to --ranks-per-node",
    "hierarchical": "works across nodes; expected --ranks-per-node from 2 up to less than --ranks",
}
BYTES_MOVED_PER_ADDED = 3  # bytes of memory per byte added: two reads, one write


@dataclass(frozen=True)
class RankLayout:
    """The assignment of ranks to nodes, in order."""

    ranks: int
    per_node: int

    @property
    def nodes(self) -> np.ndarray:
        """The node of each rank."""
        return np.arange(self.ranks) // self.per_node

    @property
    def node_count(self) -> int:
        """The number of nodes."""
        return -(-self.ranks // self.per_node)


def make_wire(bytes_per_s: float, latency: float) -> Wire:
    """Return a wire of `bytes_per_s` on which a short message takes `latency` seconds.

    Half of the latency is overhead of the two processors. A port accepts the next message as soon
    as its processor does.
    """
    return Wire(latency / 2, latency / 4, latency / 4, 1 / bytes_per_s)


def make_cluster(
    inside: Wire, between: Wire, memory_bytes_per_s: float, per_node: int, nic_count: int
) -> Cluster:
    """Return a machine of equal nodes; the ranks of a node share its memory when they add."""
    return Cluster(
        inside,
        between,
        BYTES_MOVED_PER_ADDED * per_node / memory_bytes_per_s,
        1 / memory_bytes_per_s,
        nic_count,
    )


def choose_algorithms(names: str | None, layouts: Sequence[RankLayout]) -> list[str]:
    """Return the algorithms listed in `names`, by default all that apply to some layout.

    Raises UsageError for an unknown name or an algorithm that applies to no layout.
    """
    listed = [name.strip() for name in names.split(",")] if names else list(SCHEDULES)
    for name in listed:
        config.pick(SCHEDULES, name, "algorithm")
        if names and not any(applies_to(name, layout) for layout in layouts):
            raise UsageError(f"--algorithms {name}: {LAYOUT_REQUIREMENTS[name]}")
    return [name for name in listed if any(applies_to(name, layout) for layout in layouts)]


def applies_to(name: str, layout: RankLayout) -> bool:
    """Return whether `name` applies to `layout`: direct in one node, hierarchical across nodes."""
    if name == "direct":
        return layout.node_count == 1 and layout.ranks > 1
    return name != "hierarchical" or (layout.node_count > 1 and layout.per_node > 1)


def allreduce_seconds(name: str, nbytes: int, machine: Cluster, layout: RankLayout) -> float:
    """Return the seconds of an all-reduce until the last rank has finished."""
    clocks = Clocks(machine, layout.nodes)
    SCHEDULES[name](clocks, nbytes)
    return float(clocks.now.max())


def allreduce_rows(
    machine: Cluster, layouts: Sequence[RankLayout], algorithms: Sequence[str], sizes: Sequence[int]
) -> Iterator[Row]:
    """Yield a row per layout, size and applicable algorithm."""
    for layout in layouts:
        for nbytes in sizes:
            for name in algorithms:
                if applies_to(name, layout):
                    duration = allreduce_seconds(name, nbytes, machine, layout)
                    yield allreduce_row(name, nbytes, layout, duration)


def allreduce_row(name: str, nbytes: int, layout: RankLayout, duration: float) -> Row:
    """Return one row with busbw in GB/s, as nccl-tests defines it."""
    algbw = nbytes / duration / 1e9 if duration else None
    return {
        "operation": "allreduce",
        "algorithm": name,
        "bytes": nbytes,
        "ranks": layout.ranks,
        "nodes": layout.node_count,
        "kind": "predicted",
        "predicted_s": duration,
        "algbw": algbw,
        "busbw": algbw and algbw * 2 * (layout.ranks - 1) / layout.ranks,
    }


def step_rows(
    machine: Cluster,
    layouts: Sequence[RankLayout],
    algorithms: Sequence[str],
    step: Step,
    mode: str,
) -> Iterator[Row]:
    """Yield a row per layout and algorithm; `mode`: weak (constant samples per rank) or strong."""
    for layout in layouts:
        rank_step = step.split_over(layout.ranks) if mode == "strong" else step
        for name in algorithms:
            if applies_to(name, layout):
                with_overlap, without_overlap = (
                    step_time(rank_step, SCHEDULES[name], Clocks(machine, layout.nodes), overlap)
                    for overlap in (True, False)
                )
                yield {
                    "operation": "step",
                    "algorithm": name,
                    "bytes": round(sum(step.buckets)),
                    "ranks": layout.ranks,
                    "nodes": layout.node_count,
                    "mode": mode,
                    "kind": "predicted",
                    "predicted_s": with_overlap.step,
                    "compute_s": rank_step.compute,
                    "wire_s": with_overlap.wire,
                    "exposed_s": with_overlap.exposed,
                    "without_overlap_s": without_overlap.step,
                    "efficiency": rank_step.compute / with_overlap.step,
                }


def compare_measurements(measurements: Measurements, machine: Cluster) -> Iterator[Row]:
    """Yield rows of measured all-reduces with the model's prediction and its error."""
    for row in measurements.rows:
        layout, name = RankLayout(row.ranks, -(-row.ranks // measurements.hosts)), row.algorithm
        if row.operation == "allreduce" and name in SCHEDULES and applies_to(name, layout):
            duration = allreduce_seconds(name, row.bytes, machine, layout)
            yield allreduce_row(name, row.bytes, layout, duration) | {
                "kind": "measured",
                "measured_s": row.median_s,
                "error": duration / row.median_s - 1,
            }
