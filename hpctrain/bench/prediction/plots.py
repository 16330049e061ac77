"""Plot of predictions: lines are predicted, filled marks are measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, which needs a display
from matplotlib.ticker import FuncFormatter

from hpctrain.bench.message_sizes import size_text
from hpctrain.bench.plot import SECONDS, log_axis
from hpctrain.cost_model.message_schedules import SCHEDULES

#: Okabe and Ito (2008): colour-blind people can tell them apart; marks differ too.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKS = "osD^vP*"
Row = Mapping[str, Any]


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write the plot to `path`: time over size, over ranks and, where there are any, of steps."""
    reduces = [row for row in rows if row["operation"] == "allreduce"]
    steps = [row for row in rows if row["operation"] == "step"]
    ranks = max(row["ranks"] for row in reduces if row["kind"] == "predicted")
    nbytes = max(row["bytes"] for row in reduces if row["kind"] == "predicted")
    panels = {
        f"all-reduce, {ranks} ranks": ("bytes", [r for r in reduces if r["ranks"] == ranks]),
        f"all-reduce of {size_text(nbytes)}": (
            "ranks",
            [r for r in reduces if r["bytes"] == nbytes],
        ),
    }
    if steps:
        panels[f"a step, {steps[0]['mode']} scaling"] = ("ranks", steps)
    figure = Figure((6 * len(panels), 5), layout="constrained")
    all_axes = figure.subplots(1, len(panels))
    for axes, (panel, (key, shown_rows)) in zip(all_axes, panels.items(), strict=True):
        _lines(axes, shown_rows, key)
        axes.set_title(f"predicted: {panel}")
    handles = {
        k: v for axes in all_axes for v, k in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=8)
    figure.suptitle(title.replace("$", r"\$"))
    figure.savefig(path, dpi=130)


def _lines(axes: Axes, rows: Sequence[Row], key: str) -> None:
    for name, color, mark in zip(SCHEDULES, COLORS, MARKS, strict=True):
        own_rows = sorted((r for r in rows if r["algorithm"] == name), key=lambda row: row[key])
        predicted_rows = [r for r in own_rows if r["kind"] == "predicted" and r["predicted_s"] > 0]
        points = [r for r in own_rows if r["kind"] == "measured"]
        if predicted_rows:
            style: dict[str, Any] = {"color": color, "marker": mark, "markerfacecolor": "white"}
            positions = [r[key] for r in predicted_rows]
            axes.plot(
                positions, [r["predicted_s"] for r in predicted_rows], "--", label=name, **style
            )
        if points:
            positions, seconds = [r[key] for r in points], [r["measured_s"] for r in points]
            axes.plot(positions, seconds, mark, color=color, label=f"{name}, measured")
    _scales(axes, key)


def _scales(axes: Axes, key: str) -> None:
    axes.set_xscale("log", base=2)
    log_axis(axes, SECONDS)
    axes.set_xlabel("size" if key == "bytes" else "ranks")
    axes.set_ylabel("time")
    tick_text = size_text if key == "bytes" else str
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tick_text(round(x))))
    axes.grid(alpha=0.3)
