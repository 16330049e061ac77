"""The plots of a run's metrics of the test set: curves over steps, and the confusion matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure  # not pyplot, which would look for a screen
from matplotlib.ticker import MaxNLocator

from hpctrain.core.palette import BLUE, COLORS, DASHES, MARKERS
from hpctrain.tools.report.record import RunRecord

CONFUSION = "test_confusion"
#: Metrics of the losses, drawn elsewhere, and what is no curve
OTHERS = ("test_loss", "test_accuracy", "test_rmse", "test_r2", CONFUSION)
#: Beginnings of the names of metrics from 0 to 1, which share a panel
SHARES = ("test_auc", "test_f1", "test_top_")
MAX_MARKED_POINTS = 40  #: up to so many points each gets a mark
MAX_NUMBERED = 20  #: classes whose counts are written into the cells of the matrix
HEADROOM = 1.02  #: of the axis of shares, for a line at 1


def plot_metrics(record: RunRecord) -> Figure | None:
    """Return the curves of metrics by step; None where no row has one."""
    names = [
        name
        for name in dict.fromkeys(key for row in record.rows for key in row)
        if name.startswith("test_") and name not in OTHERS
        if np.isfinite(record.column(name)).any()
    ]
    shares = [name for name in names if name.startswith(SHARES)]
    panels = [shares] * bool(shares) + [[name] for name in names if name not in shares]
    if not panels:
        return None
    figure = Figure((10, 1 + 3 * len(panels)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        _draw_curves(axes, record, panel)
        if panel is shares:
            axes.set_ylim(0, HEADROOM)
    return figure


def _draw_curves(axes: Axes, record: RunRecord, names: list[str]) -> None:
    steps = record.column("step")
    for i, name in enumerate(names):
        y = record.column(name)
        is_finite = np.isfinite(y)
        style: dict[str, Any] = {"color": COLORS[i % 8], "linestyle": DASHES[i % 4]}
        if is_finite.sum() <= MAX_MARKED_POINTS:
            style |= {"marker": MARKERS[i % 8], "markersize": 4}
        label = name.removeprefix("test_").replace("_", " ")
        axes.plot(steps[is_finite], y[is_finite], label=label, linewidth=1.5, **style)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set(xlabel="step", ylabel="test set", xlim=(0, 1.02 * steps[-1]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def plot_confusion(record: RunRecord) -> Figure | None:
    """Return the last confusion matrix as a heat map; None where no row has one.

    The shade of a cell is its share of the targets of a true class.
    """
    rows = [row for row in record.rows if row.get(CONFUSION)]
    if not rows:
        return None
    counts = np.array(rows[-1][CONFUSION], np.float64)
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1]:
        raise ValueError(f"{CONFUSION} of step {rows[-1]['step']} is no square matrix")
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    size = min(4 + 0.4 * len(counts), 10)
    figure = Figure((size, size), layout="constrained")
    axes = figure.subplots()
    shades = LinearSegmentedColormap.from_list("shares", ["white", BLUE])
    picture = axes.imshow(shares, cmap=shades, vmin=0, vmax=1)
    if len(counts) <= MAX_NUMBERED:
        axes.set(xticks=range(len(counts)), yticks=range(len(counts)))
        for (true, predicted), count in np.ndenumerate(counts):
            color = "white" if shares[true, predicted] > 0.5 else "black"
            axes.text(predicted, true, f"{count:.0f}", ha="center", va="center", color=color)
    axes.set(xlabel="predicted class", ylabel="true class")
    figure.colorbar(picture, ax=axes, shrink=0.7, label="share of the true class")
    figure.suptitle(f"test set after step {rows[-1]['step']}")
    return figure
