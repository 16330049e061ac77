"""Draw benchmarks/results/pipeline-*.json: measured steps divided by those of the clock.

python benchmarks/plots/pipeline.py       (needs the extra: pip install 'hpctrain[docs]')
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpctrain.core.palette import COLORS, MARKERS
from hpctrain.parallel.schedules import SCHEDULES

RESULTS = Path(__file__).parent.parent / "results"
MPIS = {"openmpi": "Open MPI", "mpich": "MPICH"}
NAMES = list(SCHEDULES)
#: panel: (files, the row's `what`, limit of the claim)
PANELS = {
    "stages that sleep": (("pipeline-sleep-threads", "pipeline-sleep-*-ranks-*"), "sleep", 0.03),
    "a transformer on 2 ranks": (("pipeline-compute-2-ranks-*",), "transformer", 0.10),
    "stages that sleep, hosts at 1 Gbit/s": (("pipeline-hosts-*",), "sleep", 0.10),
}


def main() -> None:
    figure = Figure((14, 4.6), layout="constrained")
    for axes, (title, (patterns, study, limit)) in zip(
        figure.subplots(1, len(PANELS)), PANELS.items(), strict=True
    ):
        files = sorted({file for p in patterns for file in RESULTS.glob(f"{p}.json")})
        rows = [(f, row) for f in files for row in json.loads(f.read_text())["rows"]]
        draw_panel(axes, [(f, row) for f, row in rows if row["what"] == study], limit)
        axes.set_title(title, fontsize="medium")
    figure.suptitle("measured step / step of the clock; dotted: the claim")
    figure.savefig(RESULTS / "pipeline.png", dpi=110)


def draw_panel(axes: Axes, rows: list[tuple[Path, dict[str, Any]]], limit: float) -> None:
    """Draw a mark per schedule and setting; settings lie beside each other."""
    labels = list(dict.fromkeys(label_of(*row) for row in rows))
    for i, label in enumerate(labels):
        ratios = {row["schedule"]: row["to_clock"] for f, row in rows if label_of(f, row) == label}
        shift = (i - (len(labels) - 1) / 2) * 0.8 / len(labels)
        axes.plot([NAMES.index(name) + shift for name in ratios], list(ratios.values()),
                  MARKERS[i % len(MARKERS)], color=COLORS[i % len(COLORS)], label=label,
                  markersize=6)  # fmt: skip
    for y, style in ((1, "-"), (1 + limit, ":"), (1 - limit, ":")):
        axes.axhline(y, linestyle=style, color="grey", linewidth=1)
    axes.set_xticks(range(len(NAMES)), NAMES, rotation=35, ha="right")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)


def label_of(file: Path, row: dict[str, Any]) -> str:
    place = MPIS.get(file.stem.rpartition("-")[2], "threads")
    if row["what"] == "transformer":
        return f"{place}, M = {row['micro']}"
    return f"{row['ranks']} ranks, {place}"


if __name__ == "__main__":
    main()
