"""Plot of predicted steps on grids: time and efficiency over ranks, a line per size of pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot, which needs a display
from matplotlib.ticker import FuncFormatter, PercentFormatter

from hpctrain.core.palette import COLORS, DASHES, MARKERS, plain
from hpctrain.tools.bench.plot import SECONDS_FORMAT, format_log_axis


def draw_grids(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Write the plot to `path`."""
    figure = Figure((12, 5), layout="constrained")
    time, efficiency = figure.subplots(1, 2)
    for i, pipe in enumerate(sorted({row["pipe"] for row in rows})):
        own = sorted((row for row in rows if row["pipe"] == pipe), key=lambda row: row["ranks"])
        style: dict[str, Any] = {
            "color": COLORS[i % len(COLORS)],
            "linestyle": DASHES[i % len(DASHES)],
            "marker": MARKERS[i % len(MARKERS)],
            "markerfacecolor": "white",
        }
        ranks = [row["ranks"] for row in own]
        time.plot(ranks, [row["step_s"] for row in own], label=f"pipe {pipe}", **style)
        efficiency.plot(ranks, [row["efficiency"] for row in own], **style)
    format_log_axis(time, SECONDS_FORMAT)
    time.set_ylabel("time of a step, predicted")
    efficiency.set_ylabel("share of the step in which ranks compute, predicted")
    efficiency.set_ylim(0, 1)
    efficiency.yaxis.set_major_formatter(PercentFormatter(1))
    for axes in (time, efficiency):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({row["ranks"] for row in rows}))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{round(x):,}"))
        axes.set_xlabel("ranks (data x pipe)")
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=8)
    figure.suptitle(plain(title))
    figure.savefig(path, dpi=130)
