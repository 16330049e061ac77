"""A study drawn: throughput and efficiency over the sizes; where the time of a step goes.

Filled marks were measured, with their intervals; hollow ones share cores; dashed lines with white
marks are predicted. Colours are those of Okabe and Ito (2008), as in all plots of hpctrain; bars
differ in their greys too, and have edges.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
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

from hpctrain.report.plots import BLACK, BLUE, GREY, ORANGE, VERMILION
from hpctrain.scaling.results import Result, Row
from hpctrain.scaling.show import GAP, MEASURED, PREDICTED, tells, title

FORMATS = ("png", "svg")
WIDTH = 11.0  #: of all figures, so that their letters are as large on a page
EDGE = "#444444"
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "compute_s": ("compute", {"facecolor": BLUE}),
    "wait_s": ("wait (exposed wire)", {"facecolor": ORANGE}),
    "other_s": ("other (reading, bookkeeping)", {"facecolor": "#EEEEEE"}),
}
WIRE = ("wire (may overlap compute)", {"facecolor": BLACK})
#: In which order the legend names what is drawn.
LEGEND = ("measured", "gap", "predicted", "ideal")


def plots(found: Result) -> dict[str, bytes]:
    """Return {file name: PNG or SVG}; none where nothing was measured."""
    if not found.of(MEASURED):
        return {}
    figures = {"scaling": scaling(found), "time": time(found)}
    return {f"{name}.{kind}": _bytes(figures[name], kind) for name in figures for kind in FORMATS}


def for_page(found: Result) -> dict[str, bytes]:
    """Return {file name: PNG} of the same without the title, which the page itself has."""
    if not found.of(MEASURED):
        return {}
    figures = {"scaling.png": scaling(found, ""), "time.png": time(found, "")}
    return {name: _bytes(figure, "png") for name, figure in figures.items()}


def scaling(found: Result, heading: str | None = None) -> Figure:
    """Draw samples/s and efficiency over ranks or nodes, beside the ideal."""
    figure = Figure((WIDTH, 4.6), layout="constrained")
    rate, efficiency = figure.subplots(1, 2)
    for axes, key in ((rate, "samples_per_s"), (efficiency, "efficiency")):
        _ideal(axes, found, key)
        _predictions(axes, found, key)
        _points(axes, found, key)
        _gaps(axes, found)
        _sizes_axis(axes, found)
        axes.grid(alpha=0.3)
    _log_rate(rate)
    rate.set_ylabel("throughput [samples/s]")
    efficiency.set_ylabel("efficiency [% of ideal]")
    efficiency.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    efficiency.set_ylim(0, max(1.1, efficiency.get_ylim()[1]))
    handles, labels = rate.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: LEGEND.index(labels[i].split()[0].strip(",:")))
    handles, labels = [handles[i] for i in order], [labels[i] for i in order]
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize="small")
    figure.suptitle(_plain(title(found.study) if heading is None else heading))
    return figure


def time(found: Result, heading: str | None = None) -> Figure:
    """Draw the time of a step per size: compute, exposed wire, the rest; beside it the wire."""
    rows = found.rows
    figure = Figure((WIDTH, 4.6), layout="constrained")
    axes = figure.subplots()
    floor = np.zeros(len(rows))
    for key, (label, style) in PARTS.items():
        height = np.array([max(row.get(key) or 0.0, 0.0) for row in rows])
        _bars(axes, found, height, floor, label, style, -0.08, 0.56)
        floor += height
    wire = np.array([row.get("wire_s") or 0.0 for row in rows])
    _bars(axes, found, wire, np.zeros(len(rows)), *WIRE, 0.3, 0.12)
    for i, row in enumerate(rows):
        if row["kind"] == GAP:
            axes.text(i, 0, "not measured", ha="center", va="bottom", color=EDGE)
    axes.set_xticks(range(len(rows)), [_label(row, found) for row in rows])
    axes.set_xlim(-0.7, max(len(rows), 4) - 0.3)
    axes.set_xlabel(_unit(found))
    axes.set_ylabel("time of a step, mean over ranks")
    axes.yaxis.set_major_formatter(EngFormatter(unit="s"))
    axes.set_ylim(0, 1.08 * max(floor.max(), wire.max()))
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=5, fontsize="small")
    figure.suptitle(_plain(title(found.study) if heading is None else heading))
    return figure


def _bars(
    axes: Axes,
    found: Result,
    height: np.ndarray,
    floor: np.ndarray,
    label: str,
    style: dict[str, Any],
    shift: float,
    width: float,
) -> None:
    """Draw a part of each bar, those that are predicted paler and hatched."""
    at = np.arange(len(height)) + shift
    bars = axes.bar(at, height, width, floor, label=label, edgecolor=EDGE, linewidth=0.6, **style)
    for bar, row in zip(bars, found.rows, strict=True):
        if row["kind"] == PREDICTED:
            bar.set(facecolor=(*to_rgb(bar.get_facecolor()), 0.45), hatch="//", linestyle="--")


def _points(axes: Axes, found: Result, key: str) -> None:
    """Draw what was measured: filled marks, hollow ones where ranks share cores."""
    for shared, label in ((False, "measured, 95 % interval"), (True, "measured, oversubscribed")):
        rows = [r for r in found.of(MEASURED) if (r["ranks_per_core"] > 1) == shared]
        if rows:
            if not shared:
                _line(axes, found, key)
            style: dict[str, Any] = {"markerfacecolor": "white"} if shared else {}
            values = np.array(_values(rows, key))
            low, high = _spread(rows, key)
            axes.errorbar(_at(rows, found), values, [values - low, high - values], color=BLUE,
                          marker="s" if shared else "o", linestyle="", capsize=4, label=label,
                          **style)  # fmt: skip


def _line(axes: Axes, found: Result, key: str) -> None:
    """Join what was measured on cores of its own; a gap breaks the line."""
    rows = [r for r in found.rows if r["kind"] == GAP or r.get("ranks_per_core") == 1]
    rows = [row for row in rows if row["kind"] != PREDICTED]
    values = [row.get(key, np.nan) for row in rows]
    axes.plot(_at(rows, found), values, "-", color=BLUE)


def _predictions(axes: Axes, found: Result, key: str) -> None:
    """Draw the dashed line from the last size that the model was fitted to."""
    rows = found.of(PREDICTED)
    if rows:
        words = ["predicted (alpha-beta model", *["untested"] * (not found.tested)]
        label = (
            ", ".join(words)
            + ")"
            + ", band: 95 % interval" * any(row.get(f"{key}_ci95") for row in rows)
        )
        apart = [r for r in found.of(MEASURED) if r["ranks_per_core"] == 1 and r["ranks"] > 1]
        line = [*apart[-1:], *rows]
        low, high = _spread(line, key)
        axes.fill_between(_at(line, found), low, high, color=VERMILION, alpha=0.15, linewidth=0)
        axes.plot(_at(line, found), _values(line, key), "--", color=VERMILION, marker="D",
                  markerfacecolor="white", markevery=slice(len(line) - len(rows), None),
                  label=label)  # fmt: skip


def _ideal(axes: Axes, found: Result, key: str) -> None:
    base = found.of(MEASURED)[0]
    sizes = [row for row in found.rows if row["ranks"] >= base["ranks"]]
    values = [base[key] * (1 if key == "efficiency" else row["ranks"] / base["ranks"])
              for row in sizes]  # fmt: skip
    pairs = sorted(set(zip(_at(sizes, found), values, strict=True)))
    axes.plot(*zip(*pairs, strict=True), ":", color=BLACK, linewidth=1.2, label="ideal")


def _gaps(axes: Axes, found: Result) -> None:
    for i, row in enumerate(found.of(GAP)):
        label = "gap: not measured" if i == 0 else None
        axes.axvspan(*(_at([row], found)[0] * factor for factor in (0.93, 1.07)), color=GREY,
                     alpha=0.5, linewidth=0, label=label)  # fmt: skip


def _sizes_axis(axes: Axes, found: Result) -> None:
    at = sorted(set(_at(found.rows, found)))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(at))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_xlim(at[0] / 1.25, at[-1] * 1.25)
    axes.set_xlabel(_unit(found))


def _log_rate(axes: Axes) -> None:
    """Make the axis of rates logarithmic, with ticks at 1, 2 and 5 times powers of ten."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def _at(rows: Sequence[Row], found: Result) -> list[int]:
    return [row["nodes" if found.study.by_nodes else "ranks"] for row in rows]


def _unit(found: Result) -> str:
    if found.study.by_nodes:
        return f"nodes, {found.study.sizes[0].per_node} ranks on each"
    apart = all(size.per_node == 1 for size in found.study.sizes) and len(found.study.sizes) > 1
    return "ranks, each on a node of its own" if apart else "ranks"


def _label(row: Row, found: Result) -> str:
    size = f"{_at([row], found)[0]}"
    if row["kind"] != MEASURED:
        return f"{size}\n{row['kind']}"
    return f"{size}\noversubscribed" if row["ranks_per_core"] > 1 else size


def _values(rows: Sequence[Row], key: str) -> list[float]:
    return [row[key] for row in rows]


def _spread(rows: Sequence[Row], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of intervals: the value itself where there is none that tells anything."""
    values = np.array(_values(rows, key))
    half = np.array([row[f"{key}_ci95"] if tells(row, key) else 0.0 for row in rows])
    return values - half, values + half


def _plain(text: str) -> str:
    """Return a title in which a dollar sign begins no formula."""
    return text.replace("$", r"\$")


def _bytes(figure: Figure, kind: str) -> bytes:
    file = io.BytesIO()
    # An SVG without its date is the same for the same study.
    figure.savefig(file, format=kind, dpi=130, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()
