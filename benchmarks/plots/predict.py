"""Draw benchmarks/results/predict-*.json: predicted against measured times, a panel per machine.

python benchmarks/plots/predict.py        (needs the extra: pip install 'hpctrain[docs]')
"""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from hpctrain.core.palette import COLORS

RESULTS = Path(__file__).parent.parent / "results"
ALGORITHMS = ("ring", "tree", "double-tree", "recursive-doubling", "halving-doubling")
MARKS = {"allreduce": "o", "step": "*"}


def main() -> None:
    files = sorted(RESULTS.glob("predict-*.json"))
    figure = Figure((4.5 * len(files), 5), layout="constrained")
    for axes, file in zip(figure.subplots(1, len(files), squeeze=False)[0], files, strict=True):
        for row in json.loads(file.read_text())["rows"]:
            axes.plot(row["median_s"], row["predicted_s"], MARKS[row["operation"]], markersize=8,
                      color=COLORS[ALGORITHMS.index(row["algorithm"])], markeredgecolor="black",
                      label=f"{row['operation']}, {row['algorithm']}")  # fmt: skip
        limits = axes.get_xlim()
        for factor, style in ((1, "-"), (1.15, ":"), (1 / 1.15, ":")):
            axes.plot(
                limits, [factor * limit for limit in limits], style, color="grey", linewidth=1
            )
        axes.set(xscale="log", yscale="log", xlabel="measured", ylabel="predicted")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(EngFormatter(unit="s"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_title(file.stem.removeprefix("predict-").replace("-", " "), fontsize="medium")
        axes.grid(alpha=0.3)
    handles_by_label = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(
        handles_by_label.values(), handles_by_label.keys(), loc="outside lower center", ncols=4
    )
    figure.suptitle("fitted to single messages and additions; dotted: 15 % off")
    figure.savefig(RESULTS / "predict.png", dpi=110)


if __name__ == "__main__":
    main()
