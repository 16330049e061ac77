"""The plots of a run, as PNG: losses and accuracies, the learning rate, the parts of the time.

Lines also differ in their dashes, so that a print in grey can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, which would look for a screen
from matplotlib.ticker import MaxNLocator, PercentFormatter

from hpctrain.core.palette import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILION, plain
from hpctrain.tools.report.many_ranks import describe_marks, mark_losses, plot_many_ranks
from hpctrain.tools.report.metrics import plot_confusion, plot_metrics
from hpctrain.tools.report.pipeline import plot_schedule, rank_label
from hpctrain.tools.report.record import TIMES, RunRecord
from hpctrain.tools.show.plots import SECONDS_FORMAT, explain, image

LINES: dict[str, dict[str, Any]] = {
    "train": {"color": BLUE, "linestyle": "-", "marker": "o"},
    "test": {"color": VERMILION, "linestyle": "--", "marker": "s"},
}
MAX_MARKED_POINTS = 40  #: up to so many points each gets a mark; more would hide the line
DECADES = 30.0  #: a loss that falls by more than this factor is shown on a logarithmic axis
LABELS = 16  #: more would run into each other
BINS = 60  #: a histogram has no more bars than this
WIRE = "wire (time in collectives)"
UNITS = {"h": 3600.0, "min": 60.0, "s": 1.0}


def plots(record: RunRecord) -> dict[str, bytes]:
    """Return {file name: PNG} of the plots for which `record` has rows."""
    figures = {"loss.png": _plot_losses, "metrics.png": plot_metrics,
               "confusion.png": plot_confusion,
               "rate.png": _plot_rate, "time.png": _plot_step_times,
               "ranks.png": _plot_rank_times, "schedule.png": plot_schedule,
               "staleness.png": _plot_staleness}  # fmt: skip
    images = {name: draw(record) for name, draw in figures.items() if record.rows}
    return {name: image(figure) for name, figure in images.items() if figure is not None}


def _plot_losses(record: RunRecord) -> Figure:
    """Losses and, if any is above zero, accuracies: by step and by wall time."""
    kinds = ["loss"] + ["accuracy"] * bool(np.nansum(_train_and_test(record, "accuracy")) > 0)
    figure = Figure((10, 0.6 + 3 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), 2, sharex="col", sharey="row", squeeze=False)
    seconds = np.cumsum(record.seconds_per_row("wall_s"))
    unit = choose_unit(seconds[-1])
    for kind, (by_step, by_time) in zip(kinds, axes, strict=True):
        _curves(by_step, record, kind, record.column("step"))
        _curves(by_time, record, kind, seconds / UNITS[unit])
        by_step.set_ylabel(kind)
        if by_step.lines:
            by_step.legend()
        _step_axis(by_step, record)
        by_step.label_outer()
    axes[-1][1].set(xlabel=f"wall time in training [{unit}]", xlim=(0, None))
    for _, by_time in axes:
        losses = record.losses()
        mark_losses(by_time, losses, [loss.at_s / UNITS[unit] for loss in losses])
    figure.suptitle(_title(record, " and ".join(kinds)))
    return figure


def _curves(axes: Axes, record: RunRecord, kind: str, x: np.ndarray) -> None:
    for name, style in LINES.items():
        y = record.column(f"{name}_{kind}")
        finite = np.isfinite(y)
        sparse = finite.sum() <= MAX_MARKED_POINTS
        marker_style = style if sparse else {**style, "marker": ""}
        if finite.any():
            axes.plot(x[finite], y[finite], label=name, markersize=4, linewidth=1.5, **marker_style)
    scale_losses(axes, _train_and_test(record, kind))
    axes.grid(alpha=0.3)


def scale_losses(axes: Axes, values: np.ndarray) -> None:
    """Make the axis logarithmic if `values` span more than a factor of DECADES."""
    values = values[np.isfinite(values)]
    if values.size and 0 < values.min() * DECADES < values.max():
        axes.set_yscale("log")


def _train_and_test(record: RunRecord, kind: str) -> np.ndarray:
    return np.concatenate([record.column(f"{name}_{kind}") for name in LINES])


def _plot_rate(record: RunRecord) -> Figure | None:
    """The learning rate; None where no row has it."""
    if not np.isfinite(record.column("rate")).any():
        return None
    figure, axes = _make_figure(record, "learning rate")
    _step_axis(axes, record)
    points, curve = record.rates()
    style: dict[str, Any] = (
        {} if curve and len(points) > 1 else {"linestyle": "", "marker": "o", "markersize": 4}
    )
    axes.plot(*points.T, color=BLUE, clip_on=False, **style)
    axes.set(ylabel="rate" if curve else "rate at the last step of each interval", ylim=(0, None))
    return figure


def _plot_step_times(record: RunRecord) -> Figure:
    """The time of a step: disjoint parts are stacked, the time on the wire overlays them."""
    steps = record.column("steps")
    times = {x: np.nan_to_num(record.seconds_per_row(x) / steps) for x in (*TIMES, "data_wait_s")}
    wire = times["wire_s"]
    figure, axes = _make_figure(record, "time of a step on rank 0")
    _step_axis(axes, record)
    begin = record.column("step") - steps
    _draw_stacked(axes, begin, steps, times)
    if wire.any():
        axes.hlines(wire, begin, begin + steps, color=BLACK, linewidth=1.5, label=WIRE)
    _time_axis(figure, axes, "time per step, mean of an interval")
    return figure


def _plot_rank_times(record: RunRecord) -> Figure | None:
    """The time of each rank; None where no row has it."""
    times = record.by_rank()
    if not times:
        return None
    wall, wait, wire = (times[f"{x}_s"] for x in ("wall", "wait", "wire"))
    resume_text = f" since step {record.resumed()[-1]:.0f}" if record.resumed() else ""
    subject = f"time of each rank{resume_text}"
    if len(wall) > LABELS:
        servers = range(record.first_server or len(wall), len(wall))
        return plot_many_ranks(_title(record, subject), times, servers, record.rank_hosts)
    figure, axes = _make_figure(record, subject)
    ranks, width = np.arange(len(wall)), 0.6 if wire.any() else 0.8
    _draw_stacked(axes, ranks - 0.4, np.full(len(wall), width), times)
    if wire.any():
        axes.bar(ranks + 0.2, wire, 0.2, align="edge", color=BLACK, label=WIRE)
    if 1 < len(wall) <= LABELS:
        for rank, height, share in zip(ranks, wall, wait / wall, strict=True):
            axes.annotate(f"idle {share:.0%}", (rank - 0.4 + width / 2, height), (0, 2),
                          ha="center", textcoords="offset points", fontsize=8)  # fmt: skip
    _rank_axis(axes, len(wall), record.first_server)
    if (mesh := record.summary.get("mesh")) and 1 < len(wall) <= LABELS and "ranks" in mesh:
        rank_labels = [
            rank_label(mesh, int(rank)).replace(": ", "\n").replace(", ", "\n", 1) for rank in ranks
        ]
        axes.set_xticks(ranks, rank_labels)
    axes.set_ylim(top=1.08 * wall.max())  # room for the labels above the bars
    _time_axis(figure, axes, "time")
    return figure


def _rank_axis(axes: Axes, size: int, first_server: int | None) -> None:
    """Name the ranks, those that only serve as servers; one bar alone does not fill the axis."""
    serving = range(size if first_server is None else first_server, size)
    if size <= LABELS:
        names = [f"{rank}\nserver" if rank in serving else f"{rank}" for rank in range(size)]
        axes.set_xticks(range(size), names)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    servers = f" (servers: {serving[0]} to {size - 1})" if serving and size > LABELS else ""
    margin = 1.0 if size == 1 else 0.0
    axes.set(xlabel=f"rank{servers}", xlim=(-0.6 - margin, size - 0.4 + margin))


def _plot_staleness(record: RunRecord) -> Figure | None:
    """The staleness of gradients, in all and in each interval; None where none could be stale."""
    table = record.staleness()
    if not table.size:
        return None
    figure = Figure((10, 4), layout="constrained")
    total, by_step = figure.subplots(1, 2)
    values = np.arange(table.shape[1])
    _histogram(total, table[-1])
    increments = np.diff(table, axis=0, prepend=0)
    counts = increments.sum(axis=1)
    mean_staleness = np.divide(
        increments @ values, counts, np.full(len(increments), np.nan), where=counts > 0
    )
    mark = "o" if len(mean_staleness) <= MAX_MARKED_POINTS else ""
    by_step.plot(record.column("step"), mean_staleness, color=BLUE, marker=mark, markersize=4)
    by_step.set(
        ylabel="staleness, mean of an interval", ylim=(0, 1.1 * max(np.nanmax(mean_staleness), 1))
    )
    by_step.grid(alpha=0.3)
    _step_axis(by_step, record)
    figure.suptitle(_title(record, "staleness: updates between pull and push of a gradient"))
    return figure


def _histogram(axes: Axes, counts: np.ndarray) -> None:
    width = -(-len(counts) // BINS)
    share = np.add.reduceat(counts, np.arange(0, len(counts), width)) / counts.sum()
    mean = counts @ np.arange(len(counts)) / counts.sum()
    axes.bar(np.arange(0, len(counts), width) - 0.5, share, width, align="edge", color=BLUE,
             edgecolor="white", linewidth=0.5)  # fmt: skip
    axes.axvline(mean, color=ORANGE, linestyle="--", linewidth=2,
                 label=f"mean {mean:.3g}, max {len(counts) - 1}")  # fmt: skip
    axes.legend()
    axes.set(
        xlabel="staleness" + f", {width} values a bar" * (width > 1), ylabel="share of gradients"
    )
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)


def _draw_stacked(
    axes: Axes, begin: np.ndarray, width: np.ndarray, times: Mapping[str, np.ndarray]
) -> None:
    """Draw stacked bars of disjoint times that add up to the wall time."""
    wall, compute, wait, data_wait = (
        times[f"{x}_s"] for x in ("wall", "compute", "wait", "data_wait")
    )
    other_s = np.maximum(wall - compute - wait - data_wait, 0)
    time_parts = {"compute": (compute, BLUE), "wait (exposed wire)": (wait, ORANGE),
                  "wait for data": (data_wait, GREEN),
                  "other (evaluation, checkpoints)": (other_s, GREY)}  # fmt: skip
    floor = np.zeros_like(wall)
    for label, (height, color) in time_parts.items():
        if not height.any():  # a rank alone never waits
            continue
        edge = 0.5 if len(wall) <= MAX_MARKED_POINTS else 0
        axes.bar(begin, height, width, floor, align="edge", color=color, label=label,
                 edgecolor="white", linewidth=edge)  # fmt: skip
        floor = floor + height


def _time_axis(figure: Figure, axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter(SECONDS_FORMAT)
    explain(figure, axes, 4)


def _make_figure(record: RunRecord, subject: str) -> tuple[Figure, Axes]:
    figure = Figure((10, 4), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_title(_title(record, subject))
    return figure, axes


def _step_axis(axes: Axes, record: RunRecord) -> None:
    losses = record.losses()
    marks = ["dotted: resumed"] * bool(record.resumed()) + [describe_marks(losses)] * bool(losses)
    label = "step" + f" ({'; '.join(marks)})" * bool(marks)
    axes.set(xlabel=label, xlim=(0, 1.02 * record.column("step")[-1]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for step in record.resumed():
        axes.axvline(step, color=BLACK, linestyle=":", linewidth=1)
    mark_losses(axes, losses, [loss.step for loss in losses])


def _title(record: RunRecord, subject: str) -> str:
    return plain(f"{record.name}: {subject}")


def choose_unit(seconds: float) -> str:
    """Return the largest unit that fits at least five times."""
    return next((unit for unit, size in UNITS.items() if seconds >= 5 * size), "s")
