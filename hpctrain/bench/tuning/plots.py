"""Plot of the tuning table: time over size, with rings around the choices of `auto`."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, which needs a display

from hpctrain.bench.plot import COLORS, MARKS, SECONDS, axes_over
from hpctrain.bench.tuning.printed_table import heading, kinds
from hpctrain.core import thresholds
from hpctrain.tuning.table import Table


def draw(table: Table, path: Path) -> None:
    """Write the plot of `table` to `path`, PNG or SVG by its suffix."""
    times_by_kind = kinds(table)
    figure = Figure((6.5 * len(times_by_kind), 5.2), layout="constrained")
    all_axes = figure.subplots(1, len(times_by_kind), sharey=True, squeeze=False)[0]
    names = list(dict.fromkeys(row.algorithm for row in table.rows))
    for axes, (kind, times) in zip(all_axes, times_by_kind.items(), strict=True):
        _lines(axes, times, names)
        axes_over(axes, list(times), "time of a call", SECONDS)
        axes.label_outer()
        axes.set_title(heading(table, kind))
    all_axes[0].legend(fontsize="small")
    fingerprint = table.fingerprint
    gpu_text = f", {fingerprint.device}; {fingerprint.paths}" if fingerprint.on_gpu else ""
    figure.suptitle(f"all-reduce of float32, {fingerprint.mpi}, {fingerprint.layout}{gpu_text}")
    figure.savefig(path, dpi=130)


def _lines(axes: Axes, times: thresholds.Times, names: list[str]) -> None:
    """Draw a line per algorithm, and rings at the sizes for which it is chosen."""
    for number, name in enumerate(names):
        sizes = [nbytes for nbytes, seconds in times.items() if name in seconds]
        own_times = [times[nbytes][name] for nbytes in sizes]
        color, mark = COLORS[number % 8], MARKS[number % 8]
        axes.plot(
            sizes, own_times, label=name, color=color, marker=mark, linewidth=1.3, markersize=3.5
        )
    choices = thresholds.choices_at(times)
    seconds = [times[nbytes][name] for nbytes, name in choices.items()]
    axes.plot(list(choices), seconds, "o", markersize=9, markerfacecolor="none",
              markeredgecolor="black", label="taken by auto")  # fmt: skip
