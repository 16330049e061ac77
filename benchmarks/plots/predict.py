"""Draw benchmarks/results/predict-*.json: predicted against measured times, a panel per machine.

python benchmarks/plots/predict.py        (needs the extra: pip install 'hpctrain[docs]')
"""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from hpctrain.core.palette import COLORS, MARKERS

RESULTS = Path(__file__).parent.parent / "results"
ALGORITHMS = ("ring", "tree", "double-tree", "recursive-doubling", "halving-doubling")
COLUMNS = 3


def main() -> None:
    files = sorted(RESULTS.glob("predict-*.json"))
    lines = -(-len(files) // COLUMNS)
    figure = Figure((4 * COLUMNS, 0.8 + 3.4 * lines), layout="constrained")
    panels = figure.subplots(lines, COLUMNS, squeeze=False).ravel()
    for empty in panels[len(files) :]:
        empty.set_axis_off()
    for axes, file in zip(panels, files, strict=False):
        for row in json.loads(file.read_text())["rows"]:
            i, is_step = ALGORITHMS.index(row["algorithm"]), row["operation"] == "step"
            axes.plot(row["median_s"], row["predicted_s"], MARKERS[i], color=COLORS[i],
                      markeredgecolor=COLORS[i], markerfacecolor="none" if is_step else COLORS[i],
                      markersize=10 if is_step else 6,
                      label=f"{row['operation']}, {row['algorithm']}")  # fmt: skip
        measured = axes.dataLim.intervalx
        limits = measured[0] / 1.3, measured[1] * 1.3
        for factor, style in ((1, "-"), (1.15, ":"), (1 / 1.15, ":")):
            axes.plot(
                limits, [factor * limit for limit in limits], style, color="grey", linewidth=1
            )
        axes.set(xscale="log", yscale="log", xlabel="measured", ylabel="predicted")
        subs = (1, 2, 5) if limits[1] < 30 * limits[0] else (1,)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=subs))
            axis.set_major_formatter(EngFormatter(unit="s"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_title(panel_title(file), fontsize="medium")
        axes.grid(alpha=0.3)
    handles_by_label = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles_by_label.values(), handles_by_label.keys(), loc="outside lower center", ncols=4
    )
    figure.suptitle("fitted to single messages and additions; dotted: 15 % off")
    figure.savefig(RESULTS / "predict.png", dpi=110)


def panel_title(file: Path) -> str:
    """Return the machine and the MPI of a file such as predict-2-hosts-1gbit-2-ranks-mpich.json."""
    name = file.stem.removeprefix("predict-").replace("-hosts-", " hosts, ")
    name = name.replace("local-", "one node, ").replace("1gbit-", "1 Gbit/s, ")
    mpi = {"openmpi": "Open MPI", "mpich": "MPICH"}[name.rpartition("-")[2]]
    return name.rpartition("-")[0].replace("-ranks", f" ranks, {mpi}")


if __name__ == "__main__":
    main()
