"""Predict all-reduces and training steps on machines that you do not have.

A machine has two kinds of wires, seconds per byte added and a memory bandwidth. They come from
options, measurements (`measurements.py`) or defaults. Each row is marked *measured* or *predicted*;
tables have predictions beside measurements, and of steps on grids a row per grid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.core.fitted_table import make_table
from hpctrain.core.fitted_table import print_table as print_fitted
from hpctrain.tools.bench.prediction.measurements import Measurements
from hpctrain.tools.bench.units import size_text
from hpctrain.tuning.model.loggp import Clocks, Cluster, Wire
from hpctrain.tuning.model.message_schedules import SCHEDULES
from hpctrain.tuning.model.training_step import Step, step_time

Row = dict[str, Any]
LAYOUT_REQUIREMENTS = {
    "direct": "works in one node's memory; expected --ranks from 2 up to --ranks-per-node",
    "hierarchical": "works across nodes; expected --ranks-per-node from 2 up to less than --ranks",
}
BYTES_MOVED_PER_ADDED = 3  # bytes of memory per byte added: two reads, one write
SECONDS_PER_UNIT = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
HEADINGS = ("ranks", "data x pipe", "micro-batches", "step", "pipeline", "compute", "efficiency",
            "samples/s")  # fmt: skip


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
    algorithms = [name.strip() for name in names.split(",")] if names else list(SCHEDULES)
    for name in algorithms:
        config.pick(SCHEDULES, name, "algorithm")
        if names and not any(applies_to(name, layout) for layout in layouts):
            raise UsageError(f"--algorithms {name}: {LAYOUT_REQUIREMENTS[name]}")
    return [name for name in algorithms if any(applies_to(name, layout) for layout in layouts)]


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


def format_time(seconds: float) -> str:
    """Return a time in s, ms or us, with one to three digits before the point."""
    seconds = float(f"{seconds:.3g}")  # 999.6 us are 1 ms
    unit = next((name for name, unit_s in SECONDS_PER_UNIT.items() if seconds >= unit_s), "us")
    return f"{seconds / SECONDS_PER_UNIT[unit]:.3g} {unit}"


def make_tables(rows: Sequence[Row]) -> Iterator[tuple[str, Table]]:
    """Yield (title, table): measurements with their predictions, then pure predictions."""
    if measured_rows := [row for row in rows if row["kind"] == "measured"]:
        yield "measured, and the model's prediction", _measured_table(measured_rows)
    predictions = [row for row in rows if row["kind"] == "predicted"]
    allreduces, steps = (
        [row for row in predictions if row["operation"] == operation]
        for operation in ("allreduce", "step")
    )
    for ranks in sorted({row["ranks"] for row in allreduces}):
        rank_rows = [row for row in allreduces if row["ranks"] == ranks]
        title = f"predicted: all-reduce on {ranks} ranks, {rank_rows[0]['nodes']} nodes (* fastest)"
        yield title, _allreduce_table(rank_rows)
    if steps:
        step_text = f"{steps[0]['mode']} scaling, gradients of {size_text(steps[0]['bytes'])}"
        yield f"predicted: a step, {step_text}", _step_table(steps)


def _measured_table(rows: Sequence[Row]) -> Table:
    cells = (
        (
            row["algorithm"],
            str(row["ranks"]),
            size_text(row["bytes"]),
            format_time(row["measured_s"]),
            format_time(row["predicted_s"]),
            f"{row['error']:+.0%}",
        )
        for row in rows
    )
    headings = ("algorithm", "ranks", "size", "measured", "predicted", "error")
    return make_table(headings, cells, "algorithm")


def _allreduce_table(rows: Sequence[Row]) -> Table:
    """Return a row per size and a column per algorithm; a star marks the fastest."""
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    table = make_table(["size", *algorithms])
    for nbytes in dict.fromkeys(row["bytes"] for row in rows):
        seconds_by_algorithm = {
            r["algorithm"]: r["predicted_s"] for r in rows if r["bytes"] == nbytes
        }
        fastest_s = min(seconds_by_algorithm.values())
        time_cells = [
            format_time(seconds_by_algorithm[name])
            + ("*" if seconds_by_algorithm[name] == fastest_s else " ")
            for name in algorithms
        ]
        table.add_row(size_text(nbytes), *time_cells)
    return table


def _step_table(rows: Sequence[Row]) -> Table:
    """Return a row per rank count and algorithm."""
    columns = {"step": "predicted_s", "compute": "compute_s", "wire": "wire_s",
            "exposed": "exposed_s", "without overlap": "without_overlap_s"}  # fmt: skip
    cells = (
        (
            str(row["ranks"]),
            row["algorithm"],
            *(format_time(row[column]) for column in columns.values()),
            f"{row['efficiency']:.1%}",
        )
        for row in rows
    )
    return make_table(["ranks", "algorithm", *columns, "efficiency"], cells, "algorithm")


def print_table(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print the table on stdout."""
    rates = {
        ranks: max(row["samples_per_s"] for row in rows if row["ranks"] == ranks)
        for ranks in {row["ranks"] for row in rows}
    }
    cells = (
        (
            f"{row['ranks']:,}",
            f"{row['data']:,} x {row['pipe']}",
            str(row["micro_batches"]),
            *(format_time(row[f"{name}_s"]) for name in ("step", "pipeline", "compute")),
            f"{row['efficiency']:.1%}",
            f"{row['samples_per_s']:,.4g}"
            + ("*" if row["samples_per_s"] == rates[row["ranks"]] else " "),
        )
        for row in rows
    )
    print_fitted(make_table(HEADINGS, cells, title=f"{title} (* most samples/s)"), 160)
