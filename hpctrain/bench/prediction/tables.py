"""Tables of predictions; times that were not measured are called predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from hpctrain.bench.message_sizes import size_text

Row = Mapping[str, Any]
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def time(seconds: float) -> str:
    """Return seconds in the unit in which they have one to three digits before the point."""
    seconds = float(f"{seconds:.3g}")  # 999.6 us are 1 ms
    unit = next((name for name, size in UNITS.items() if seconds >= size), "us")
    return f"{seconds / UNITS[unit]:.3g} {unit}"


def tables(rows: Sequence[Row]) -> Iterator[tuple[str, Table]]:
    """Yield titles and tables: measurements beside their predictions, then predictions."""
    if measured := [row for row in rows if row["kind"] == "measured"]:
        yield "measured, and the model's prediction", _measured(measured)
    predictions = [row for row in rows if row["kind"] == "predicted"]
    reduces, steps = (
        [row for row in predictions if row["operation"] == operation]
        for operation in ("allreduce", "step")
    )
    for ranks in sorted({row["ranks"] for row in reduces}):
        group = [row for row in reduces if row["ranks"] == ranks]
        title = f"predicted: all-reduce on {ranks} ranks, {group[0]['nodes']} nodes (* fastest)"
        yield title, _allreduces(group)
    if steps:
        about = f"{steps[0]['mode']} scaling, gradients of {size_text(steps[0]['bytes'])}"
        yield f"predicted: a step, {about}", _steps(steps)


def _measured(rows: Sequence[Row]) -> Table:
    table = Table()
    for heading in ("algorithm", "ranks", "size", "measured", "predicted", "error"):
        table.add_column(heading, justify="left" if heading == "algorithm" else "right")
    for row in rows:
        numbers = time(row["measured_s"]), time(row["predicted_s"]), f"{row['error']:+.0%}"
        table.add_row(row["algorithm"], str(row["ranks"]), size_text(row["bytes"]), *numbers)
    return table


def _allreduces(rows: Sequence[Row]) -> Table:
    """Return a row per size and a column per algorithm; a star marks the fastest."""
    table = Table()
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    for heading in ("size", *names):
        table.add_column(heading, justify="right")
    for nbytes in dict.fromkeys(row["bytes"] for row in rows):
        times = {r["algorithm"]: r["predicted_s"] for r in rows if r["bytes"] == nbytes}
        best = min(times.values())
        words = [time(times[name]) + ("*" if times[name] == best else " ") for name in names]
        table.add_row(size_text(nbytes), *words)
    return table


def _steps(rows: Sequence[Row]) -> Table:
    """Return a row per rank count and algorithm."""
    table = Table()
    keys = {"step": "predicted_s", "compute": "compute_s", "wire": "wire_s",
            "exposed": "exposed_s", "without overlap": "without_overlap_s"}  # fmt: skip
    for heading in ("ranks", "algorithm", *keys, "efficiency"):
        table.add_column(heading, justify="left" if heading == "algorithm" else "right")
    for row in rows:
        times = [time(row[key]) for key in keys.values()]
        table.add_row(str(row["ranks"]), row["algorithm"], *times, f"{row['efficiency']:.1%}")
    return table
