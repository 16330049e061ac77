"""Plots of a study: throughput and efficiency over the sizes; the parts of a step's time.

Filled marks were measured, with their intervals; hollow ones share cores; dashed lines with white
marks are predicted. Colours are from Okabe and Ito (2008), as in every plot of hpctrain;
bars differ in their greys too, and have edges. The report of a study is one HTML file that holds
all it shows and needs no network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tomli_w
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure  # not pyplot, which would look for a screen
from matplotlib.ticker import (
    EngFormatter,
    FixedLocator,
    FuncFormatter,
    LogLocator,
    NullLocator,
    PercentFormatter,
)

from hpctrain.core.palette import BLACK, BLUE, GREY, ORANGE, VERMILION, plain
from hpctrain.tools.report.page import encode, render, text_of
from hpctrain.tools.scaling.output import tables
from hpctrain.tools.scaling.output.tables import GAP, MEASURED, PREDICTED, is_meaningful, title
from hpctrain.tools.scaling.results import Result, Row
from hpctrain.tools.show.plots import SECONDS_FORMAT, image

FORMATS = ("png", "svg")
WIDTH = 11.0  #: the same for every figure, so that their letters are as large on a page
EDGE = "#444444"
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "compute_s": ("compute", {"facecolor": BLUE}),
    "wait_s": ("wait (exposed wire)", {"facecolor": ORANGE}),
    "other_s": ("other (reading, bookkeeping)", {"facecolor": "#EEEEEE"}),
}
WIRE = ("wire (may overlap compute)", {"facecolor": BLACK})
#: The order of the legend.
LEGEND = ("measured", "gap", "predicted", "ideal")
PAGE = "report.html"
CAPTIONS = {
    "scaling.png": "Samples/s and efficiency over sizes, beside the ideal; predictions dashed.",
    "time.png": "The time of a step of each size: compute, wait, other; the wire beside it.",
}


def plots(
    result: Result, heading: str | None = None, formats: Sequence[str] = FORMATS
) -> dict[str, bytes]:
    """Return {file name: PNG or SVG}; none where nothing was measured.

    The `heading` is the title of the study by default; a page needs none, it has a title itself.
    """
    if not result.of(MEASURED):
        return {}
    figures = {"scaling": scaling(result, heading), "time": time(result, heading)}
    return {f"{name}.{kind}": image(figures[name], kind) for name in figures for kind in formats}


def scaling(result: Result, heading: str | None = None) -> Figure:
    """Draw samples/s and efficiency over ranks or nodes, beside the ideal."""
    figure = Figure((WIDTH, 4.6), layout="constrained")
    rate, efficiency = figure.subplots(1, 2)
    for axes, key in ((rate, "samples_per_s"), (efficiency, "efficiency")):
        _draw_ideal(axes, result, key)
        _draw_predictions(axes, result, key)
        _draw_points(axes, result, key)
        _draw_gaps(axes, result)
        _sizes_axis(axes, result)
        axes.grid(alpha=0.3)
    _log_rate(rate, result)
    rate.set_ylabel("throughput [samples/s]")
    top = max(1.1, efficiency.get_ylim()[1])
    efficiency.set(ylabel="efficiency [% of ideal]", ylim=(0, top))
    efficiency.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    handles, labels = rate.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: LEGEND.index(labels[i].split()[0].strip(",:")))
    handles, labels = [handles[i] for i in order], [labels[i] for i in order]
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize="small")
    figure.suptitle(plain(title(result.study) if heading is None else heading))
    return figure


def time(result: Result, heading: str | None = None) -> Figure:
    """Draw the time of a step per size: compute, exposed wire, the rest; beside it the wire."""
    rows = result.rows
    figure = Figure((WIDTH, 4.6), layout="constrained")
    axes = figure.subplots()
    floor = np.zeros(len(rows))
    for key, (label, style) in PARTS.items():
        height = np.array([max(row.get(key) or 0.0, 0.0) for row in rows])
        _draw_bars(axes, result, height, floor, label, style, -0.08, 0.56)
        floor += height
    wire = np.array([row.get("wire_s") or 0.0 for row in rows])
    _draw_bars(axes, result, wire, np.zeros(len(rows)), *WIRE, 0.3, 0.12)
    for i, row in enumerate(rows):
        if row["kind"] == GAP:
            axes.text(i, 0, "not measured", ha="center", va="bottom", color=EDGE)
    axes.set_xticks(range(len(rows)), [_label(row, result) for row in rows])
    axes.set(
        xlabel=_unit(result),
        xlim=(-0.7, max(len(rows), 4) - 0.3),
        ylabel="time of a step, mean over ranks",
        ylim=(0, 1.08 * max(floor.max(), wire.max())),
    )
    axes.yaxis.set_major_formatter(SECONDS_FORMAT)
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=5, fontsize="small")
    figure.suptitle(plain(title(result.study) if heading is None else heading))
    return figure


def _draw_bars(
    axes: Axes,
    result: Result,
    height: np.ndarray,
    floor: np.ndarray,
    label: str,
    style: dict[str, Any],
    shift: float,
    width: float,
) -> None:
    """Draw a part of each bar, those that are predicted paler and hatched."""
    positions = np.arange(len(height)) + shift
    bars = axes.bar(
        positions, height, width, floor, label=label, edgecolor=EDGE, linewidth=0.6, **style
    )
    for bar, row in zip(bars, result.rows, strict=True):
        if row["kind"] == PREDICTED:
            bar.set(facecolor=(*to_rgb(bar.get_facecolor()), 0.45), hatch="//", linestyle="--")


def _draw_points(axes: Axes, result: Result, key: str) -> None:
    """Draw the measured sizes: filled marks, hollow ones where ranks share cores."""
    for is_oversubscribed in (False, True):
        rows = [r for r in result.of(MEASURED) if (r["ranks_per_core"] > 1) == is_oversubscribed]
        label_words = ["measured", *["oversubscribed"] * is_oversubscribed]
        has_interval = any(row.get(f"{key}_ci95") is not None for row in rows)
        label = ", ".join([*label_words, *["95 % interval"] * has_interval])
        if rows:
            if not is_oversubscribed:
                _draw_line(axes, result, key)
            style: dict[str, Any] = {"markerfacecolor": "white"} if is_oversubscribed else {}
            values = np.array(_values(rows, key))
            low, high = _spread(rows, key)
            axes.errorbar(_positions_of(rows, result), values, [values - low, high - values],
                          color=BLUE, marker="s" if is_oversubscribed else "o", linestyle="",
                          capsize=4, label=label, **style)  # fmt: skip


def _draw_line(axes: Axes, result: Result, key: str) -> None:
    """Join the measured sizes whose ranks have cores of their own; a gap breaks the line."""
    rows = [r for r in result.rows if r["kind"] == GAP or r.get("ranks_per_core") == 1]
    rows = [row for row in rows if row["kind"] != PREDICTED]
    values = [row.get(key, np.nan) for row in rows]
    axes.plot(_positions_of(rows, result), values, "-", color=BLUE)


def _draw_predictions(axes: Axes, result: Result, key: str) -> None:
    """Draw the dashed line from the last size that the model was fitted to."""
    rows = result.of(PREDICTED)
    if rows:
        words = ["predicted (alpha-beta model", *["untested"] * (not result.tested)]
        label = (
            ", ".join(words)
            + ")"
            + ", band: 95 % interval" * any(row.get(f"{key}_ci95") for row in rows)
        )
        own_cores = [r for r in result.of(MEASURED) if r["ranks_per_core"] == 1 and r["ranks"] > 1]
        line = [*own_cores[-1:], *rows]
        low, high = _spread(line, key)
        axes.fill_between(
            _positions_of(line, result), low, high, color=VERMILION, alpha=0.15, linewidth=0
        )
        axes.plot(_positions_of(line, result), _values(line, key), "--", color=VERMILION,
                  marker="D", markerfacecolor="white", markevery=slice(len(line) - len(rows), None),
                  label=label)  # fmt: skip


def _draw_ideal(axes: Axes, result: Result, key: str) -> None:
    base = result.of(MEASURED)[0]
    sizes = [row for row in result.rows if row["ranks"] >= base["ranks"]]
    values = [base[key] * (1 if key == "efficiency" else row["ranks"] / base["ranks"])
              for row in sizes]  # fmt: skip
    pairs = sorted(set(zip(_positions_of(sizes, result), values, strict=True)))
    axes.plot(*zip(*pairs, strict=True), ":", color=BLACK, linewidth=1.2, label="ideal")


def _draw_gaps(axes: Axes, result: Result) -> None:
    for i, row in enumerate(result.of(GAP)):
        label = "gap: not measured" if i == 0 else None
        position = _positions_of([row], result)[0]
        axes.axvspan(position * 0.93, position * 1.07, color=GREY, alpha=0.5, linewidth=0,
                     label=label)  # fmt: skip


def _sizes_axis(axes: Axes, result: Result) -> None:
    positions = sorted(set(_positions_of(result.rows, result)))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(positions))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set(xlabel=_unit(result), xlim=(positions[0] / 1.25, positions[-1] * 1.25))


def _log_rate(axes: Axes, result: Result) -> None:
    """Make the axis of rates logarithmic, with ticks at 1, 2 and 5 times powers of ten.

    The interval of a noisy rate may end near zero, far below all means: there the axis is cut.
    """
    axes.set_yscale("log")
    lowest_mean = min(row["samples_per_s"] for row in result.rows if row["kind"] != GAP)
    axes.set_ylim(bottom=max(axes.get_ylim()[0], lowest_mean / 4))
    axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def _positions_of(rows: Sequence[Row], result: Result) -> list[int]:
    return [row["nodes" if result.study.by_nodes else "ranks"] for row in rows]


def _unit(result: Result) -> str:
    if result.study.by_nodes:
        return f"nodes, {result.study.sizes[0].per_node} ranks on each"
    one_per_node = (
        all(size.per_node == 1 for size in result.study.sizes) and len(result.study.sizes) > 1
    )
    return "ranks, each on a node of its own" if one_per_node else "ranks"


def _label(row: Row, result: Result) -> str:
    size = f"{_positions_of([row], result)[0]}"
    if row["kind"] != MEASURED:
        return f"{size}\n{row['kind']}"
    return f"{size}\noversubscribed" if row["ranks_per_core"] > 1 else size


def _values(rows: Sequence[Row], key: str) -> list[float]:
    return [row[key] for row in rows]


def _spread(rows: Sequence[Row], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of intervals: the value itself where there is no meaningful interval."""
    values = np.array(_values(rows, key))
    half = np.array([row[f"{key}_ci95"] if is_meaningful(row, key) else 0.0 for row in rows])
    return values - half, values + half


def page(result: Result, images: Mapping[str, bytes], changes: Sequence[str]) -> str:
    """Return the page as HTML; `images` are PNGs by file name."""
    table = tables.table(result)
    return render(
        __package__,
        title=tables.title(result.study),
        lead=list(tables.summary_lines(result)),
        gaps=len(result.of(tables.GAP)),
        sizes=len(result.study.sizes),
        images=encode({CAPTIONS[name]: png for name, png in images.items()}),
        headings=[str(column.header) or "remarks" for column in table.columns],
        rows=list(zip((row["kind"] for row in result.rows), tables.cells(result), strict=True)),
        facts=tables.facts(result),
        changes=changes,
        machine={name.replace("_", " "): text_of(value) for name, value in result.machine.items()},
        recipe=tomli_w.dumps(result.study.tables),
    )
