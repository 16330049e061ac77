"""Losses and accuracies of several runs in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure  # not pyplot, which would look for a screen

from hpctrain.core.errors import UsageError
from hpctrain.core.palette import COLORS, DASHES, MARKERS, plain
from hpctrain.tools.report import record
from hpctrain.tools.report.plots import MAX_MARKED_POINTS, UNITS, choose_unit, scale_losses

METRICS = ("train_loss", "test_loss", "test_accuracy")


def draw(folders: Sequence[Path], path: Path) -> None:
    """Write the plot to `path`, PNG or SVG by its suffix: by step and by wall time.

    A panel for each of METRICS that any run has; runs differ in colour and dashes.
    """
    runs = [record.read(folder) for folder in folders]
    drawn = [m for m in METRICS if any(np.isfinite(run.column(m)).any() for run in runs)]
    if not drawn:
        raise UsageError(f"--plot: expected rows of metrics, seen none in {folders[0]}")
    seconds = [np.cumsum(run.seconds_per_row("wall_s")) for run in runs]
    unit = choose_unit(max(clock[-1] for clock in seconds if len(clock)))
    figure = Figure((10, 0.8 + 2.6 * len(drawn)), layout="constrained")
    panels = figure.subplots(len(drawn), 2, sharex="col", sharey="row", squeeze=False)
    for metric, (by_step, by_time) in zip(drawn, panels, strict=True):
        for i, (run, clock) in enumerate(zip(runs, seconds, strict=True)):
            y = run.column(metric)
            finite = np.isfinite(y)
            style: dict[str, Any] = {
                "color": COLORS[i % len(COLORS)],
                "linestyle": DASHES[i % len(DASHES)],
            }
            if finite.sum() <= MAX_MARKED_POINTS:  # a lone point has no line
                style |= {"marker": MARKERS[i % len(MARKERS)], "markersize": 4}
            label = plain(str(folders[i])) if metric == drawn[0] else None
            by_step.plot(run.column("step")[finite], y[finite], label=label, **style)
            by_time.plot(clock[finite] / UNITS[unit], y[finite], **style)
        values = np.concatenate([run.column(metric) for run in runs])
        for axes in (by_step, by_time):
            axes.grid(alpha=0.3)
            scale_losses(axes, values)
        by_step.set_ylabel(metric.replace("_", " "))
    panels[-1][0].set_xlabel("step")
    panels[-1][1].set_xlabel(f"wall time in training [{unit}]")
    figure.legend(loc="outside upper center", frameon=False)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path}: {error}") from None
