"""Draw benchmarks/results/engines-*.json, a picture per study; see benchmarks/engines.py.

python benchmarks/plots/engines.py        (needs the extra: pip install 'hpctrain[docs]')
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator, PercentFormatter

from hpctrain.core.palette import BLACK, BLUE, COLORS, DASHES, MARKERS, ORANGE

sys.path.insert(0, str(Path(__file__).parents[1]))
from lib.results import RESULTS, find_file, read_text

Row = dict[str, Any]
SLOWER = (BLUE, ORANGE, BLACK)  #: a bar's colour by how slow a worker is: also three greys


def main() -> None:
    figures_by_study: Mapping[str, Callable[[list[Row]], Figure]] = {
        "straggler": draw_straggler,
        "staleness": draw_staleness,
        "period": draw_period,
        "bytes": draw_bytes_sent,
    }
    for study, function in figures_by_study.items():
        path = RESULTS / f"engines-{study}.json"
        if find_file(path).exists():
            rows = [r for r in json.loads(read_text(path))["rows"] if r["role"] == "result"]
            figure = function(rows)
            figure.savefig(path.with_suffix(".png"), dpi=110)


def group_rows(rows: Sequence[Row], *keys: str) -> dict[tuple, list[Row]]:
    """Return the rows by their values of `keys`, in the order in which these come."""
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[key] for key in keys)].append(row)
    return groups


def median_and_range(values: Sequence[float]) -> tuple[float, list[list[float]]]:
    """Return the median, and how far smallest and largest are from it."""
    middle = float(np.median(values))
    return middle, [[middle - min(values)], [max(values) - middle]]


def draw_straggler(rows: list[Row]) -> Figure:
    """Time to the target by method and by how slow one worker is; a bar of seeds on each."""
    figure, axes = plt.subplots(figsize=(10, 4.2), layout="constrained")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    factors = sorted({row["slow_factor"] for row in rows})
    width = 0.8 / len(factors)
    for i, factor in enumerate(factors):
        for position, method in enumerate(methods):
            selected_rows = [r for r in rows if (r["method"], r["slow_factor"]) == (method, factor)]
            times = [r["time_to_target_s"] or np.nan for r in selected_rows]
            middle, error = median_and_range(times)
            x = position + (i - (len(factors) - 1) / 2) * width
            label = f"one worker {factor:g} times slower" if factor > 1 else "no slow worker"
            axes.bar(x, middle, width, color=SLOWER[i], label=label if position == 0 else None)
            axes.errorbar(x, middle, error, color="0.45", capsize=2, linewidth=1.2)
    axes.set(yscale="log", ylabel="time to 95 % test accuracy [s]")
    axes.yaxis.set_major_locator(FixedLocator([0.5, 1, 2, 5, 10, 20, 50]))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks(range(len(methods)), [m.replace(" ", "\n", 1) for m in methods])
    axes.set_title("8 workers, 20 ms of compute per gradient; median and range of the seeds")
    axes.grid(axis="y", which="both", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend()
    return figure


def draw_staleness(rows: list[Row]) -> Figure:
    """Test error over the rate: one device, then n-softsync with and without the rule."""
    counts = sorted({row["workers"] for row in rows} - {1})
    figure, panels = plt.subplots(
        1, len(counts), figsize=(11, 5), sharey=True, layout="constrained"
    )
    single = [row for row in rows if row["method"] == "single"]
    for panel, workers in zip(panels, counts, strict=True):
        draw_line(panel, single, "rate", "black", "x-", "one device")
        selected_rows = [row for row in rows if row["workers"] == workers]
        softsync_values = sorted({row["softsync"] for row in selected_rows})
        for (method, n), group in group_rows(selected_rows, "method", "softsync").items():
            mean_staleness = np.mean([row["staleness_mean"] for row in group])
            is_scaled = method != "none"
            i = softsync_values.index(n)
            rule = "rate / staleness" if is_scaled else "plain rate"
            name = f"n = {n}, {rule}, staleness {mean_staleness:.1f}"
            draw_line(
                panel,
                group,
                "rate",
                COLORS[i],
                MARKERS[i] + ("-" if is_scaled else ":"),
                name,
            )
        panel.set(xscale="log", yscale="log", xlabel="rate", ylim=(0.015, 1.1))
        panel.set_title(f"{workers} workers, n-softsync")
        panel.grid(which="both", alpha=0.3)
        panel.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))
        format_percent(panel)
    panels[0].set_ylabel("test error, mean and range of the seeds")
    return figure


def format_percent(axes: Axes) -> None:
    """Label a logarithmic axis of errors with percents."""
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.yaxis.set_major_locator(FixedLocator([0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 0.9]))
    axes.yaxis.set_minor_locator(NullLocator())


def draw_line(axes: Axes, rows: list[Row], x: str, color: str, style: str, label: str) -> None:
    """Draw the mean test error over column `x`, with the range of the seeds."""
    groups = sorted(group_rows(rows, x).items())
    position = [key[0] for key, _ in groups]
    errors = [[1 - row["accuracy"] for row in group] for _, group in groups]
    axes.plot(position, [np.mean(e) for e in errors], style, color=color, label=label)
    axes.fill_between(position, [min(e) for e in errors], [max(e) for e in errors], color=color,
                      alpha=0.12, linewidth=0)  # fmt: skip


def draw_period(rows: list[Row]) -> Figure:
    """Test error over steps, a line per seed; thicker, the median of the seeds."""
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for i, ((method,), group) in enumerate(group_rows(rows, "method").items()):
        curves = [np.array(row["curve"])[:, 1:].T for row in group]
        grid = np.linspace(0, min(steps[-1] for steps, _ in curves), 25)
        errors = [np.interp(grid, steps, 1 - accuracy) for steps, accuracy in curves]
        for steps, accuracy in curves:
            axes.plot(steps, 1 - accuracy, color=COLORS[i], linewidth=0.6, alpha=0.4)
        axes.plot(grid, np.median(errors, axis=0), f"{MARKERS[i]}{DASHES[i]}", color=COLORS[i],
                  markersize=5, label=f"{method}, rate {group[0]['rate']:g}")  # fmt: skip
    axes.set(yscale="log", xlabel="step (a batch of each worker)", ylabel="test error")
    format_percent(axes)
    axes.set_title("4 workers, parameters exchanged every 10 steps; thin: a seed, thick: median")
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    return figure


def draw_bytes_sent(rows: list[Row]) -> Figure:
    """Test error over bytes sent."""
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for i, ((method,), group) in enumerate(group_rows(rows, "method").items()):
        points = []
        for (period,), selected_rows in group_rows(group, "period").items():
            middle, error = median_and_range([1 - row["accuracy"] for row in selected_rows])
            sent_bytes = np.mean([row["bytes_sent_per_rank"] for row in selected_rows])
            points.append((sent_bytes / 2**20, middle))
            axes.errorbar(*points[-1], error, color=COLORS[i], capsize=2)
            if len(group_rows(group, "period")) > 1:
                axes.annotate(f"H = {period}", points[-1], (5, 7), textcoords="offset points",
                              fontsize=8)  # fmt: skip
        # All-reduce and H = 1 send as much with as large an error: a hollow mark shows both.
        style = {"markersize": 11, "markerfacecolor": "none"} if len(points) == 1 else {}
        line = f"{MARKERS[i]}{DASHES[i] if len(points) > 1 else ''}"
        axes.plot(*zip(*points, strict=True), line, color=COLORS[i], label=method, **style)
    axes.set(xscale="log", xlabel="sent per rank [MiB]", ylabel="test error")
    axes.margins(x=0.08)
    axes.xaxis.set_major_locator(FixedLocator([2, 5, 10, 20, 50, 100]))
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_title("4 workers, 192 steps; median and range of the seeds")
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    return figure


if __name__ == "__main__":
    main()
