"""The table of predicted steps on grids: a row per grid, a star at the fastest of as many ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.core.fitted_table import make_table
from hpctrain.core.fitted_table import print_table as print_fitted
from hpctrain.tools.bench.prediction.tables import format_time

HEADINGS = ("ranks", "data x pipe", "micro-batches", "step", "pipeline", "compute", "efficiency",
            "samples/s")  # fmt: skip


def print_table(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print the table on stdout."""
    table = make_table(HEADINGS, title=f"{title} (* most samples/s)")
    for row in rows:
        rate = max(other["samples_per_s"] for other in rows if other["ranks"] == row["ranks"])
        table.add_row(
            f"{row['ranks']:,}",
            f"{row['data']:,} x {row['pipe']}",
            str(row["micro_batches"]),
            *(format_time(row[f"{name}_s"]) for name in ("step", "pipeline", "compute")),
            f"{row['efficiency']:.1%}",
            f"{row['samples_per_s']:,.4g}" + ("*" if row["samples_per_s"] == rate else " "),
        )
    print_fitted(table, 160)
