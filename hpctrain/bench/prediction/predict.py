"""Predicts all-reduces and training steps on machines that you do not have.

A machine is two kinds of wires, seconds per byte added, and memory: from flags, from measurements
(`measurements.py`), or else defaults. Rows mark the times that were measured; all others are called
*predicted*.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain import config
from hpctrain.bench.prediction.measurements import Measurements
from hpctrain.core.errors import UsageError
from hpctrain.cost_model.loggp import Clocks, Cluster, Wire
from hpctrain.cost_model.message_schedules import SCHEDULES
from hpctrain.cost_model.training_step import Step, step_time

Row = dict[str, Any]
REQUIRED_TIMES = {
    "direct": "works in one node's memory; expected --ranks from 2 up to --ranks-per-node",
    "hierarchical": "works across nodes; expected --ranks-per-node from 2 up to less than --ranks",
}
BYTES_MOVED_PER_ADDED = 3  # bytes of memory per byte added: two are read, one is written


@dataclass(frozen=True)
class RankLayout:
    """Ranks, filled into nodes in order."""

    ranks: int
    per_node: int

    @property
    def nodes(self) -> np.ndarray:
        """The node of each rank."""
        return np.arange(self.ranks) // self.per_node

    @property
    def count(self) -> int:
        """The number of nodes."""
        return -(-self.ranks // self.per_node)


def wire(speed: float, latency: float) -> Wire:
    """Return the wire of `speed` bytes/s on which a short message takes `latency` seconds.

    Half of that goes to the processors at both ends, and a port takes the next message as soon as
    its processor can.
    """
    return Wire(latency / 2, latency / 4, latency / 4, 1 / speed)


def cluster(inside: Wire, between: Wire, memory: float, per_node: int, cards: int) -> Cluster:
    """Return the machine of nodes with `memory` bytes/s, shared by their ranks for additions."""
    return Cluster(inside, between, BYTES_MOVED_PER_ADDED * per_node / memory, 1 / memory, cards)


def chosen(names: str | None, layouts: Sequence[RankLayout]) -> list[str]:
    """Return the algorithms listed in `names`, by default all that fit at least one layout.

    Raises UsageError with the nearest name, or where an algorithm fits no layout.
    """
    listed = [name.strip() for name in names.split(",")] if names else list(SCHEDULES)
    for name in listed:
        config.pick(SCHEDULES, name, "algorithm")
        if names and not any(fits(name, layout) for layout in layouts):
            raise UsageError(f"--algorithms {name}: {REQUIRED_TIMES[name]}")
    return [name for name in listed if any(fits(name, layout) for layout in layouts)]


def fits(name: str, layout: RankLayout) -> bool:
    """Return whether `name` applies to `layout`: direct in one node, hierarchical across nodes."""
    if name == "direct":
        return layout.count == 1 and layout.ranks > 1
    return name != "hierarchical" or (layout.count > 1 and layout.per_node > 1)


def seconds(name: str, nbytes: int, machine: Cluster, layout: RankLayout) -> float:
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
                if fits(name, layout):
                    duration = seconds(name, nbytes, machine, layout)
                    yield allreduce_row(name, nbytes, layout, duration)


def allreduce_row(name: str, nbytes: int, layout: RankLayout, duration: float) -> Row:
    """Return one row; busbw as nccl-tests defines it, in GB/s."""
    algbw = nbytes / duration / 1e9 if duration else None
    return {
        "operation": "allreduce",
        "algorithm": name,
        "bytes": nbytes,
        "ranks": layout.ranks,
        "nodes": layout.count,
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
    """Yield a row per layout and algorithm; `mode` is weak (as many samples per rank) or strong."""
    for layout in layouts:
        rank_step = step.shared_by(layout.ranks) if mode == "strong" else step
        for name in algorithms:
            if fits(name, layout):
                overlapping, serial_s = (
                    step_time(rank_step, SCHEDULES[name], Clocks(machine, layout.nodes), overlap)
                    for overlap in (True, False)
                )
                yield {
                    "operation": "step",
                    "algorithm": name,
                    "bytes": round(sum(step.buckets)),
                    "ranks": layout.ranks,
                    "nodes": layout.count,
                    "mode": mode,
                    "kind": "predicted",
                    "predicted_s": overlapping.step,
                    "compute_s": rank_step.compute,
                    "wire_s": overlapping.wire,
                    "exposed_s": overlapping.exposed,
                    "without_overlap_s": serial_s.step,
                    "efficiency": rank_step.compute / overlapping.step,
                }


def compare(measurements: Measurements, machine: Cluster) -> Iterator[Row]:
    """Yield rows of measured all-reduces with the model's prediction and its error."""
    for row in measurements.rows:
        layout, name = RankLayout(row.ranks, -(-row.ranks // measurements.hosts)), row.algorithm
        if row.operation == "allreduce" and name in SCHEDULES and fits(name, layout):
            duration = seconds(name, row.bytes, machine, layout)
            yield allreduce_row(name, row.bytes, layout, duration) | {
                "kind": "measured",
                "measured_s": row.median_s,
                "error": duration / row.median_s - 1,
            }
