"""Plots of benchmarks: time and bandwidth over size, a line per contender.

Colours are those of Okabe and Ito (2008), which colour-blind people can tell apart; marks differ
too, so that a print in grey can be read. Bands reach from the 5th to the 95th percentile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, which needs a display
from matplotlib.ticker import (
    EngFormatter,
    FixedLocator,
    Formatter,
    FuncFormatter,
    LogLocator,
    NullLocator,
)

from hpctrain.bench.message_sizes import size_text

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKS = "osD^vP*X"
FEW_TICKS = 7  #: more sizes would run into each other
SECONDS = EngFormatter(unit="s")  #: 100 us, 1 ms
PLAIN_FORMAT = FuncFormatter(lambda y, _: f"{y:g}")
Row = Mapping[str, Any]


def draw(rows: Sequence[Row], title: str, path: Path, bandwidth: str = "busbw") -> None:
    """Write the plot of `rows` to `path`, PNG or SVG by its suffix."""
    figure = Figure((12, 5), layout="constrained")
    time, speed = figure.subplots(1, 2)
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    styles = _styles(names)
    for name in names:
        own_rows = sorted(
            (row for row in rows if row["algorithm"] == name), key=lambda r: r["bytes"]
        )
        style = styles[name]
        _line(time, own_rows, name, style, "median_s")
        timed_rows = [row for row in own_rows if row[bandwidth]]
        _line(speed, timed_rows, name, style, bandwidth)
        times = [[row[key] for row in own_rows] for key in ("p5_s", "p95_s")]
        sizes = [row["bytes"] for row in own_rows]
        time.fill_between(sizes, *times, color=style["color"], alpha=0.12, linewidth=0)
    sizes = sorted({row["bytes"] for row in rows})
    axes_over(time, sizes, "median time of a call", SECONDS)
    axes_over(speed, sizes, f"{bandwidth} [GB/s]")
    handles, labels = time.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize="small")
    figure.suptitle(title.replace("$", r"\$"))
    figure.savefig(path, dpi=130)


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a line per name; `x, A` and `x, B` have one colour, and differ in their dashes."""
    parts = {name: name.partition(", ")[::2] for name in names}
    kinds = list(dict.fromkeys(kind for kind, _ in parts.values()))
    places = list(dict.fromkeys(place for _, place in parts.values()))
    styles = {}
    for name, (kind, place) in parts.items():
        number = kinds.index(kind) % len(COLORS)
        styles[name] = {
            "color": COLORS[number],
            "marker": MARKS[number],
            "markersize": 4,
            "linestyle": ("-", "--", ":")[places.index(place) % 3],
        }
    return styles


def bars(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write the plot of training steps: each library's own step, and what communication adds."""
    batches = sorted({row["batch_per_rank"] for row in rows})
    figure = Figure((max(6, 5 * len(batches)), 4.5), layout="constrained")
    places = figure.subplots(1, len(batches), squeeze=False)[0]
    for axes, batch in zip(places, batches, strict=True):
        own_rows = [r for r in rows if r["batch_per_rank"] == batch and r["exposed_s"] is not None]
        names = [row["algorithm"] for row in own_rows]
        compute_ms = [row["alone_s"] * 1e3 for row in own_rows]
        step_ms = [row["median_s"] * 1e3 for row in own_rows]
        exposed = [w - a for w, a in zip(step_ms, compute_ms, strict=True)]
        axes.bar(
            names, compute_ms, color=COLORS[0], label="the library's step without communication"
        )
        axes.bar(names, exposed, bottom=compute_ms, color=COLORS[1], label="exposed communication")
        error_bars = [
            [row["median_s"] - row["p5_s"], row["p95_s"] - row["median_s"]] for row in own_rows
        ]
        axes.errorbar(
            names, step_ms, np.array(error_bars).T * 1e3, fmt="none", color="black", capsize=3
        )
        axes.set_title(f"{batch} samples per rank")
        axes.set_xticks(names, names, rotation=20, ha="right")
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    places[0].set_ylabel("median time of a step [ms]")
    places[0].legend(fontsize="small")
    figure.suptitle(title.replace("$", r"\$"))
    figure.savefig(path, dpi=130)


def _line(axes: Axes, rows: Sequence[Row], name: str, style: Mapping[str, Any], key: str) -> None:
    values = [row[key] for row in rows]
    axes.plot([row["bytes"] for row in rows], values, label=name, linewidth=1.5, **style)


def axes_over(
    axes: Axes, sizes: Sequence[int], label: str, numbers: Formatter = PLAIN_FORMAT
) -> None:
    """Make both axes logarithmic: `sizes` along x, `label` along y in the format of `numbers`."""
    axes.set_xscale("log", base=2)
    log_axis(axes, numbers)
    tick_step = -(-len(sizes) // FEW_TICKS)
    axes.xaxis.set_major_locator(FixedLocator(list(sizes)[::tick_step]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_text(round(size))))
    axes.set_xlabel("size")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)


def log_axis(axes: Axes, numbers: Formatter) -> None:
    """Make the y axis logarithmic with ticks at 1, 2 and 5 times powers of ten, as `numbers`.

    Minor ticks would be named too where the axis spans little, and in a form of their own.
    """
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(numbers)
