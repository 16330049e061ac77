"""Tables of predictions beside measurements; of steps on grids a row per grid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from hpctrain.core.fitted_table import print_table as print_fitted
from hpctrain.tools.bench.units import size_text
from hpctrain.tools.show.tables import make_table

Row = Mapping[str, Any]
SECONDS_PER_UNIT = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
HEADINGS = ("ranks", "data x pipe", "micro-batches", "step", "pipeline", "compute", "efficiency",
            "samples/s")  # fmt: skip


def format_time(seconds: float) -> str:
    """Return a time in s, ms or us, with one to three digits before the point."""
    seconds = float(f"{seconds:.3g}")  # 999.6 us are 1 ms
    unit = next((name for name, unit_s in SECONDS_PER_UNIT.items() if seconds >= unit_s), "us")
    return f"{seconds / SECONDS_PER_UNIT[unit]:.3g} {unit}"


def make_tables(rows: Sequence[Row]) -> Iterator[tuple[str, Table]]:
    """Yield (title, table): measurements with their predictions, then pure predictions."""
    if measured := [row for row in rows if row["kind"] == "measured"]:
        yield "measured, and the model's prediction", _measured_table(measured)
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
        times = {r["algorithm"]: r["predicted_s"] for r in rows if r["bytes"] == nbytes}
        fastest_s = min(times.values())
        time_cells = [
            format_time(times[name]) + ("*" if times[name] == fastest_s else " ")
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
