"""Draw what the other scripts here have left in a folder, as gpu.png: what is missing is left out.

python benchmarks/gpu/plot.py [benchmarks/results/gpu]        (needs: pip install 'hpctrain[docs]')
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, NullLocator

from hpctrain.core.palette import COLORS, MARKERS
from hpctrain.tools.bench.units import size_text

HATCHES = ("", "//", "..", "xx", "\\\\", "++")  #: tell bars apart in grey
RESULTS = Path(__file__).parents[1] / "results" / "gpu"
Report = dict[str, Any]


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    bars = [
        (file, draw) for pattern, draw in PANELS.items() for file in sorted(folder.glob(pattern))
    ]
    if not bars:
        sys.exit(f"nothing to draw in {folder}")
    rows = -(-len(bars) // 3)
    figure, axes = plt.subplots(
        rows, 3, figsize=(15, 4 * rows), layout="constrained", squeeze=False
    )
    for panel, (file, draw) in zip(axes.flat, bars, strict=False):
        draw(panel, json.loads(file.read_text()))
    for empty in axes.flat[len(bars) :]:
        empty.set_axis_off()
    figure.savefig(folder / "gpu.png", dpi=110)
    print("->", folder / "gpu.png")


def draw_allreduce(axes: Axes, report: Report) -> None:
    """Draw the time of each contender over the size."""
    for i, name in enumerate(dict.fromkeys(row["what"] for row in report["rows"])):
        rows = [row for row in report["rows"] if row["what"] == name]
        style = ":" if name in ("copy", "flags") or "kernel" in name else "-"
        sizes, times = [row["bytes"] for row in rows], [row["median_s"] for row in rows]
        mark, color = MARKERS[i % len(MARKERS)], COLORS[i % len(COLORS)]
        axes.plot(sizes, times, f"{mark}{style}", color=color, label=name)
    axes.set(xscale="log", yscale="log", xlabel="size", ylabel="median time of a call")
    axes.yaxis.set_major_formatter(EngFormatter(unit="s"))
    sizes = sorted({row["bytes"] for row in report["rows"]})
    axes.set_xticks(sizes, [size_text(n) for n in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    gpu_text = "one GPU" if report["one_gpu"] else "several GPUs"
    axes.set_title(f"all-reduce, {report['rows'][0]['ranks']} ranks, {gpu_text}")
    axes.legend(fontsize=7)


def draw_bars(axes: Axes, names: list[str], values: list[float], unit: str, title: str) -> None:
    """Draw a bar for each name, with its value on it."""
    bars = axes.barh(names[::-1], values[::-1], color=COLORS[0])
    axes.bar_label(bars, [f"{v:,.0f}" if v >= 100 else f"{v:.3g}" for v in values[::-1]], padding=3)
    axes.set(xlabel=unit, title=title)
    axes.margins(x=0.15)


def draw_paths(axes: Axes, report: Report) -> None:
    """Draw the rate of each path and of the legs of the staged one."""
    rows = report["rows"]
    title = f"one way, {size_text(rows[0]['bytes'])}"
    draw_bars(axes, [row["what"] for row in rows], [row["gb_per_s"] for row in rows], "GB/s", title)
    axes.set_xscale("log")  # memory of a GPU and a bus differ by two orders


def draw_optimizer(axes: Axes, report: Report) -> None:
    """Draw the rate at which each optimizer moves its bytes."""
    rows = report["rows"]
    title = f"updates, {size_text(rows[0]['bytes'])} of parameters"
    draw_bars(axes, [row["what"] for row in rows], [row["gb_per_s"] for row in rows], "GB/s", title)


def draw_steps(axes: Axes, report: Report) -> None:
    """Draw the step of each contender, a group per model."""
    models = list(dict.fromkeys(row["what"] for row in report["rows"]))
    libraries = list(dict.fromkeys(row["who"] for row in report["rows"]))
    for i, name in enumerate(libraries):
        milliseconds = [
            1e3
            * next((r["median_s"] for r in report["rows"] if (r["what"], r["who"]) == (m, name)), 0)
            for m in models
        ]
        positions = np.arange(len(models)) + (i - (len(libraries) - 1) / 2) * 0.8 / len(libraries)
        bars = axes.bar(
            positions,
            milliseconds,
            0.8 / len(libraries),
            color=COLORS[i % len(COLORS)],
            hatch=HATCHES[i % len(HATCHES)],
            edgecolor="white",
            label=name,
        )
        axes.bar_label(bars, fmt="%.3g", fontsize=7)
    axes.set_xticks(range(len(models)), models)
    axes.set(yscale="log", ylabel="time of a step [ms]", title="a training step")
    axes.legend(fontsize=7)


def draw_precision(axes: Axes, report: Report) -> None:
    """Draw the loss of each precision over the steps."""
    for i, row in enumerate(report["rows"]):
        if row.get("curve"):
            steps, losses = zip(*row["curve"], strict=True)
            style = {"color": COLORS[i], "marker": MARKERS[i], "markevery": 0.1}
            axes.plot(steps, losses, label=row["precision"], **style)
    axes.set(xlabel="step", ylabel="train loss", title="pylm")
    axes.legend(fontsize=7)


PANELS: dict[str, Callable[[Axes, Report], None]] = {
    "allreduce-*-ranks.json": draw_allreduce,
    "paths.json": draw_paths,
    "tensors.json": draw_allreduce,
    "steps.json": draw_steps,
    "optimizer.json": draw_optimizer,
    "precision.json": draw_precision,
}

if __name__ == "__main__":
    main()
