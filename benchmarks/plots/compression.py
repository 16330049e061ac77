"""Draw benchmarks/results/compression-*.json: step time, bytes, and accuracy on mnist, per method.

python benchmarks/plots/compression.py [openmpi|mpich]    (needs: pip install 'hpctrain[docs]')
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from hpctrain.core.palette import BLUE, ORANGE, VERMILION

RESULTS = Path(__file__).parents[1] / "results"
Row = dict[str, Any]


def main() -> None:
    mpi = sys.argv[1] if len(sys.argv) > 1 else "openmpi"
    files = sorted(RESULTS.glob(f"compression-steps-*-hosts-{mpi}.json"))
    steps = [json.loads(file.read_text()) for file in files]
    accuracy = json.loads(next(RESULTS.glob("compression-accuracy-*.json")).read_text())
    figure, (step_axes, accuracy_axes) = plt.subplots(
        1, 2, figsize=(10, 3.8), width_ratios=(3, 2), layout="constrained"
    )
    draw_steps(step_axes, steps)
    draw_accuracy(accuracy_axes, accuracy["rows"])
    link = steps[0]["link"].replace("gbit", " Gbit/s")
    step_axes.set_title(f"one step, MLP of 5.8 M parameters, links of {link}")
    accuracy_axes.set_title(
        f"mnist, {accuracy['model']}, {accuracy['ranks']} ranks; a dot per seed"
    )
    path = RESULTS / "compression.png"
    figure.savefig(path, dpi=150)
    print("->", path.name)


def draw_steps(axes: Axes, reports: list[Row]) -> None:
    """Draw bars of the step time, a colour per number of hosts, MiB sent written on them."""
    methods = [row["method"] for row in reports[0]["rows"]]
    for i, (report, color) in enumerate(zip(reports, (BLUE, ORANGE), strict=True)):
        positions = np.arange(len(methods)) + (i - 0.5) * 0.4
        milliseconds = [1e3 * row["median_s"] for row in report["rows"]]
        spread = [[1e3 * abs(row["median_s"] - row[p]) for row in report["rows"]]
                  for p in ("p5_s", "p95_s")]  # fmt: skip
        label = f"{report['rows'][0]['hosts']} hosts"
        bars = axes.bar(positions, milliseconds, 0.4, yerr=spread, color=color, label=label)
        axes.bar_label(bars, [mebibytes(row) for row in report["rows"]], fontsize=8, padding=2)
    axes.set_xticks(range(len(methods)), [m.replace(" ", "\n", 1) for m in methods])
    axes.set(ylabel="time of a step [ms]")
    axes.margins(y=0.1)
    axes.legend(frameon=False, title="on the bars: MiB sent per rank")


def mebibytes(row: Row) -> str:
    return f"{row['bytes_per_step'] / 2**20:.2g}" if row["bytes_per_step"] > 1e4 else "0"


def draw_accuracy(axes: Axes, rows: list[Row]) -> None:
    """Draw the test accuracy of each seed, and their mean as a line."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for i, method in enumerate(methods):
        accuracies = [100 * row["test_accuracy"] for row in rows if row["method"] == method]
        axes.plot([i] * len(accuracies), accuracies, "o", color=BLUE, alpha=0.6)
        axes.hlines(np.mean(accuracies), i - 0.3, i + 0.3, color=VERMILION)
    axes.set_xticks(range(len(methods)), [m.replace(" ", "\n", 1) for m in methods])
    axes.set(ylabel="test accuracy [%]")


if __name__ == "__main__":
    main()
