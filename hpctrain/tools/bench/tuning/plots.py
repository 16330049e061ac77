"""Plot of the tuning table: time over size, with rings around the choices of `auto`."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, which needs a display

from hpctrain.core import thresholds
from hpctrain.core.palette import COLORS, MARKERS
from hpctrain.tools.bench.plot import SECONDS_FORMAT, format_size_axes
from hpctrain.tools.bench.tuning.printed_table import memory_heading, times_by_memory
from hpctrain.tuning.table import Table


def draw_table(table: Table, path: Path) -> None:
    """Write the plot of `table` to `path`, PNG or SVG by its suffix."""
    times_by_kind = times_by_memory(table)
    figure = Figure((6.5 * len(times_by_kind), 5.2), layout="constrained")
    all_axes = figure.subplots(1, len(times_by_kind), sharey=True, squeeze=False)[0]
    algorithms = list(dict.fromkeys(row.algorithm for row in table.rows))
    for axes, (in_memory, times) in zip(all_axes, times_by_kind.items(), strict=True):
        _draw_algorithms(axes, times, algorithms)
        format_size_axes(axes, list(times), "time of a call", SECONDS_FORMAT)
        axes.label_outer()
        axes.set_title(memory_heading(table, in_memory))
    all_axes[0].legend(fontsize="small")
    fingerprint = table.fingerprint
    gpu_text = f", {fingerprint.device}; {fingerprint.paths}" if fingerprint.on_gpu else ""
    figure.suptitle(f"all-reduce of float32, {fingerprint.mpi}, {fingerprint.layout}{gpu_text}")
    figure.savefig(path, dpi=130)


def _draw_algorithms(axes: Axes, times: thresholds.Times, algorithms: list[str]) -> None:
    """Draw a line per algorithm, with a ring where `auto` chooses it."""
    for algorithm_index, algorithm in enumerate(algorithms):
        sizes = [nbytes for nbytes, seconds in times.items() if algorithm in seconds]
        algorithm_seconds = [times[nbytes][algorithm] for nbytes in sizes]
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
    chosen_algorithms = thresholds.choices_at(times)
    seconds = [times[nbytes][algorithm] for nbytes, algorithm in chosen_algorithms.items()]
    axes.plot(list(chosen_algorithms), seconds, "o", markersize=9, markerfacecolor="none",
              markeredgecolor="black", label="taken by auto")  # fmt: skip
