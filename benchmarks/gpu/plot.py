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
from matplotlib.ticker import NullLocator

from hpctrain.bench.message_sizes import size_text

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
Found = dict[str, Any]


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    drawn = [
        (file, draw) for pattern, draw in PANELS.items() for file in sorted(folder.glob(pattern))
    ]
    if not drawn:
        sys.exit(f"nothing to draw in {folder}")
    rows = -(-len(drawn) // 3)
    figure, axes = plt.subplots(
        rows, 3, figsize=(15, 4 * rows), layout="constrained", squeeze=False
    )
    for one, (file, draw) in zip(axes.flat, drawn, strict=False):
        draw(one, json.loads(file.read_text()))
    for empty in axes.flat[len(drawn) :]:
        empty.set_axis_off()
    figure.savefig(folder / "gpu.png", dpi=110)
    print("->", folder / "gpu.png")


def allreduce(axes: Axes, found: Found) -> None:
    """Draw the time of each contender over the size."""
    for i, name in enumerate(dict.fromkeys(row["what"] for row in found["rows"])):
        rows = [row for row in found["rows"] if row["what"] == name]
        style = ":" if name in ("copy", "flags") or "kernel" in name else "-"
        axes.plot([row["bytes"] for row in rows], [row["median_s"] for row in rows],
                  f"o{style}", color=COLORS[i % len(COLORS)], label=name)  # fmt: skip
    axes.set(xscale="log", yscale="log", ylabel="seconds")
    sizes = sorted({row["bytes"] for row in found["rows"]})
    axes.set_xticks(sizes, [size_text(n) for n in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    where = "one GPU" if found["one_gpu"] else "several GPUs"
    axes.set_title(f"all-reduce, {found['rows'][0]['ranks']} ranks, {where}")
    axes.legend(fontsize=7)


def bars(axes: Axes, names: list[str], values: list[float], unit: str, title: str) -> None:
    """Draw a bar for each name, with its value on it."""
    drawn = axes.barh(names[::-1], values[::-1], color=COLORS[0])
    axes.bar_label(
        drawn, [f"{v:,.0f}" if v >= 100 else f"{v:.3g}" for v in values[::-1]], padding=3
    )
    axes.set(xlabel=unit, title=title)
    axes.margins(x=0.15)


def paths(axes: Axes, found: Found) -> None:
    """Draw the rate of each path and of the legs of the staged one."""
    rows = found["rows"]
    title = f"one way, {size_text(rows[0]['bytes'])}"
    bars(axes, [row["what"] for row in rows], [row["gb_per_s"] for row in rows], "GB/s", title)
    axes.set_xscale("log")  # memory of a GPU and a bus differ by two orders


def optimizer(axes: Axes, found: Found) -> None:
    """Draw the rate at which each optimizer moves its bytes."""
    rows = found["rows"]
    title = f"updates, {size_text(rows[0]['bytes'])} of parameters"
    bars(axes, [row["what"] for row in rows], [row["gb_per_s"] for row in rows], "GB/s", title)


def steps(axes: Axes, found: Found) -> None:
    """Draw the step of each contender, a group per model."""
    models = list(dict.fromkeys(row["what"] for row in found["rows"]))
    who = list(dict.fromkeys(row["who"] for row in found["rows"]))
    for i, name in enumerate(who):
        ms = [
            1e3
            * next((r["median_s"] for r in found["rows"] if (r["what"], r["who"]) == (m, name)), 0)
            for m in models
        ]
        at = np.arange(len(models)) + (i - (len(who) - 1) / 2) * 0.8 / len(who)
        drawn = axes.bar(at, ms, 0.8 / len(who), color=COLORS[i % len(COLORS)], label=name)
        axes.bar_label(drawn, fmt="%.3g", fontsize=7)
    axes.set_xticks(range(len(models)), models)
    axes.set(yscale="log", ylabel="ms", title="a training step")
    axes.legend(fontsize=7)


def precision(axes: Axes, found: Found) -> None:
    """Draw the loss of each precision over the steps."""
    for i, row in enumerate(found["rows"]):
        if row.get("curve"):
            steps, losses = zip(*row["curve"], strict=True)
            axes.plot(steps, losses, ".-", color=COLORS[i], label=row["precision"])
    axes.set(xlabel="step", ylabel="train loss", title="pylm")
    axes.legend(fontsize=7)


PANELS: dict[str, Callable[[Axes, Found], None]] = {
    "allreduce-*-ranks.json": allreduce,
    "paths.json": paths,
    "steps.json": steps,
    "optimizer.json": optimizer,
    "precision.json": precision,
}

if __name__ == "__main__":
    main()
