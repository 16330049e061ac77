"""Plots of benchmarks: time and bandwidth over size, one line per contender; bars of steps.

Different markers keep a print in grey readable. Bands reach from the 5th to the 95th percentile.
The plot of a tuning table has rings around the choices of `auto`. In plots of predictions lines are
predicted, filled markers are measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, which needs a display
from matplotlib.ticker import (
    FixedLocator,
    Formatter,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
)

from hpctrain.core import thresholds
from hpctrain.core.palette import BLUE, COLORS, DASHES, MARKERS, ORANGE
from hpctrain.tools.bench.tune import memory_heading, times_by_memory
from hpctrain.tools.bench.units import size_text
from hpctrain.tools.show.plots import SECONDS_FORMAT, explain, save
from hpctrain.tuning.model.message_schedules import SCHEDULES
from hpctrain.tuning.table import Table

MAX_TICKS = 7  #: more labels would overlap
MAX_SPAN = 1e5  #: ticks between powers of ten would crowd an axis of a wider span
NUMBER_FORMAT = FuncFormatter(lambda y, _: f"{y:g}")
Row = Mapping[str, Any]


def draw_size_plot(rows: Sequence[Row], title: str, path: Path, bandwidth: str = "busbw") -> None:
    """Write the plot of `rows` to `path`; the bandwidth of a link has no factor: "algbw"."""
    figure = Figure((12, 5), layout="constrained")
    time_axes, bandwidth_axes = figure.subplots(1, 2)
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    styles = _line_styles(names)
    for name in names:
        own = sorted((row for row in rows if row["algorithm"] == name), key=lambda r: r["bytes"])
        for axes, column in ((time_axes, "median_s"), (bandwidth_axes, bandwidth)):
            drawn = [row for row in own if row[column]]
            values = [row[column] for row in drawn]
            axes.plot(
                [r["bytes"] for r in drawn], values, label=name, linewidth=1.5, **styles[name]
            )
        percentiles = [[row[column] for row in own] for column in ("bytes", "p5_s", "p95_s")]
        time_axes.fill_between(*percentiles, color=styles[name]["color"], alpha=0.12, linewidth=0)
    sizes = sorted({row["bytes"] for row in rows})
    format_size_axes(time_axes, sizes, "median time of a call", SECONDS_FORMAT)
    format_size_axes(bandwidth_axes, sizes, f"{bandwidth} [GB/s]")
    explain(figure, time_axes, 5, fontsize="small")
    save(figure, title, path)


def _line_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the line style of each name; `x, A` and `x, B` share a colour, not the dashes."""
    name_parts = {name: name.partition(", ")[::2] for name in names}
    algorithms = list(dict.fromkeys(algorithm for algorithm, _ in name_parts.values()))
    variants = list(dict.fromkeys(variant for _, variant in name_parts.values()))
    styles = {}
    for name, (algorithm, variant) in name_parts.items():
        color_index = algorithms.index(algorithm) % len(COLORS)
        styles[name] = {
            "color": COLORS[color_index],
            "marker": MARKERS[color_index],
            "markersize": 4,
            "linestyle": ("-", "--", ":")[variants.index(variant) % 3],
        }
    return styles


def draw_step_bars(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write the plot of training steps: compute and exposed communication of each library."""
    batches = sorted({row["batch_per_rank"] for row in rows})
    rows = [row for row in rows if row["exposed_s"] is not None]
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    figure = Figure((max(6, 5 * len(batches)), 1.7 + 0.3 * len(names)), layout="constrained")
    all_axes = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    for axes, batch in zip(all_axes, batches, strict=True):
        _draw_steps(axes, [row for row in rows if row["batch_per_rank"] == batch])
        axes.set_title(f"{batch} samples per rank", fontsize="medium")
    all_axes[0].invert_yaxis()
    explain(figure, all_axes[0], 2, fontsize="small")
    save(figure, title, path)


def _draw_steps(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw a bar per library, with the range from the 5th to the 95th percentile."""
    names = [row["algorithm"] for row in rows]
    median_s, alone_s = (np.array([row[key] for row in rows]) for key in ("median_s", "alone_s"))
    spread = [[abs(row[key] - row["median_s"]) for row in rows] for key in ("p5_s", "p95_s")]
    style: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.5}
    axes.barh(names, alone_s, color=BLUE, label="the library's step without communication", **style)
    axes.barh(
        names,
        median_s - alone_s,
        left=alone_s,
        color=ORANGE,
        label="exposed communication",
        **style,
    )
    axes.errorbar(median_s, names, xerr=spread, fmt="none", color="black", capsize=3)
    axes.set_xlabel("median time of a step")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(SECONDS_FORMAT)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def format_size_axes(
    axes: Axes, sizes: Sequence[int], y_label: str, formatter: Formatter = NUMBER_FORMAT
) -> None:
    """Make both axes logarithmic: sizes in bytes along x, numbers as `formatter` shows along y."""
    axes.set_xscale("log", base=2)
    format_log_axis(axes, formatter)
    tick_stride = -(-len(sizes) // MAX_TICKS)
    axes.xaxis.set_major_locator(FixedLocator(list(sizes)[::tick_stride]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_text(round(size))))
    axes.set(xlabel="size", ylabel=y_label)
    axes.grid(alpha=0.3)


def format_log_axis(axes: Axes, formatter: Formatter) -> None:
    """Make the y axis of drawn data logarithmic, with ticks at 1, 2 and 5 times powers of ten.

    Over many decades the powers of ten are enough.
    Minor ticks are off: on a short axis matplotlib would label them too, in another format.
    """
    axes.set_yscale("log")
    low, high = axes.dataLim.intervaly
    subs = (1, 2, 5) if high < MAX_SPAN * low else (1,)
    axes.yaxis.set_major_locator(LogLocator(10, subs))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(formatter)


def draw_table(table: Table, path: Path) -> None:
    """Write the plot of `table` to `path`, PNG or SVG by its suffix."""
    times_by_kind = times_by_memory(table)
    figure = Figure((6.5 * len(times_by_kind), 5.2), layout="constrained")
    all_axes = figure.subplots(1, len(times_by_kind), sharey=True, squeeze=False)[0]
    algorithms = list(dict.fromkeys(row.algorithm for row in table.rows))
    for axes, (in_memory, seconds_by_size) in zip(all_axes, times_by_kind.items(), strict=True):
        _draw_algorithms(axes, seconds_by_size, algorithms)
        format_size_axes(axes, list(seconds_by_size), "time of a call", SECONDS_FORMAT)
        axes.label_outer()
        axes.set_title(memory_heading(table, in_memory))
    all_axes[0].legend(fontsize="small")
    fingerprint = table.fingerprint
    gpu_text = f", {fingerprint.device}; {fingerprint.paths}" if fingerprint.on_gpu else ""
    title = f"all-reduce of float32, {fingerprint.mpi}, {fingerprint.layout}{gpu_text}"
    save(figure, title, path)


def _draw_algorithms(axes: Axes, seconds_by_size: thresholds.Times, algorithms: list[str]) -> None:
    """Draw a line per algorithm, with a ring where `auto` chooses it."""
    for algorithm_index, algorithm in enumerate(algorithms):
        sizes = [nbytes for nbytes, seconds in seconds_by_size.items() if algorithm in seconds]
        algorithm_seconds = [seconds_by_size[nbytes][algorithm] for nbytes in sizes]
        color, mark = COLORS[algorithm_index % 8], MARKERS[algorithm_index % 8]
        axes.plot(
            sizes,
            algorithm_seconds,
            label=algorithm,
            color=color,
            marker=mark,
            linewidth=1.3,
            markersize=3.5,
        )
    chosen_algorithms = thresholds.choices_at(seconds_by_size)
    seconds = [
        seconds_by_size[nbytes][algorithm] for nbytes, algorithm in chosen_algorithms.items()
    ]
    axes.plot(list(chosen_algorithms), seconds, "o", markersize=9, markerfacecolor="none",
              markeredgecolor="black", label="taken by auto")  # fmt: skip


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
        _draw_panel(axes, panel_rows, x_column)
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


def _draw_panel(axes: Axes, rows: Sequence[Row], x_column: str) -> None:
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
        pipe_rows = sorted(
            (row for row in rows if row["pipe"] == pipe), key=lambda row: row["ranks"]
        )
        style: dict[str, Any] = {
            "color": COLORS[i % len(COLORS)],
            "linestyle": DASHES[i % len(DASHES)],
            "marker": MARKERS[i % len(MARKERS)],
            "markerfacecolor": "white",
        }
        ranks = [row["ranks"] for row in pipe_rows]
        time.plot(ranks, [row["step_s"] for row in pipe_rows], label=f"pipe {pipe}", **style)
        efficiency.plot(ranks, [row["efficiency"] for row in pipe_rows], **style)
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
