"""Plots of predictions: lines are predicted, filled markers are measured.

Of steps on grids: time and efficiency over ranks, a line per size of pipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, which needs a display
from matplotlib.ticker import FuncFormatter, PercentFormatter

from hpctrain.core.palette import COLORS, DASHES, MARKERS
from hpctrain.tools.bench.plot import format_log_axis, format_size_axes
from hpctrain.tools.bench.units import size_text
from hpctrain.tools.show.plots import SECONDS_FORMAT, save
from hpctrain.tuning.model.message_schedules import SCHEDULES

Row = Mapping[str, Any]


def draw_prediction(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write the plot to `path`: time over size, time over ranks and, if predicted, step times."""
    allreduces = [row for row in rows if row["operation"] == "allreduce"]
    steps = [row for row in rows if row["operation"] == "step"]
    ranks = max(row["ranks"] for row in allreduces if row["kind"] == "predicted")
    nbytes = max(row["bytes"] for row in allreduces if row["kind"] == "predicted")
    panels = {
        f"all-reduce, {ranks} ranks": ("bytes", [r for r in allreduces if r["ranks"] == ranks]),
        f"all-reduce of {size_text(nbytes)}": (
            "ranks",
            [r for r in allreduces if r["bytes"] == nbytes],
        ),
    }
    if steps:
        panels[f"a step, {steps[0]['mode']} scaling"] = ("ranks", steps)
    figure = Figure((6 * len(panels), 5), layout="constrained")
    panel_axes = figure.subplots(1, len(panels))
    for axes, (panel_title, (x_column, panel_rows)) in zip(panel_axes, panels.items(), strict=True):
        _draw_algorithms(axes, panel_rows, x_column)
        axes.set_title(f"predicted: {panel_title}")
    handles_by_label = {
        label: handle
        for axes in panel_axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles_by_label.values(), handles_by_label.keys(), loc="outside lower center", ncols=8
    )
    save(figure, title, path)


def _draw_algorithms(axes: Axes, rows: Sequence[Row], x_column: str) -> None:
    for name, color, marker in zip(SCHEDULES, COLORS, MARKERS, strict=False):
        algorithm_rows = sorted(
            (r for r in rows if r["algorithm"] == name), key=lambda row: row[x_column]
        )
        predicted_rows = [
            r for r in algorithm_rows if r["kind"] == "predicted" and r["predicted_s"] > 0
        ]
        measured_rows = [r for r in algorithm_rows if r["kind"] == "measured"]
        if predicted_rows:
            style: dict[str, Any] = {"marker": marker, "markerfacecolor": "white", "label": name}
            points = [(r[x_column], r["predicted_s"]) for r in predicted_rows]
            axes.plot(*zip(*points, strict=True), "--", color=color, **style)
        if measured_rows:
            points = [(r[x_column], r["measured_s"]) for r in measured_rows]
            axes.plot(*zip(*points, strict=True), marker, color=color, label=f"{name}, measured")
    if x_column == "bytes":
        format_size_axes(axes, sorted({row["bytes"] for row in rows}), "time", SECONDS_FORMAT)
    else:
        axes.set_xscale("log", base=2)
        format_log_axis(axes, SECONDS_FORMAT)
        axes.set(xlabel="ranks", ylabel="time")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{round(x)}"))
        axes.grid(alpha=0.3)


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
    efficiency.set(ylabel="share of the step in which ranks compute, predicted", ylim=(0, 1))
    efficiency.yaxis.set_major_formatter(PercentFormatter(1))
    for axes in (time, efficiency):
        axes.set_xscale("log", base=2)
        axes.set(xticks=sorted({row["ranks"] for row in rows}), xlabel="ranks (data x pipe)")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{round(x):,}"))
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=8)
    save(figure, title, path)
