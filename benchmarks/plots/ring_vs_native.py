"""Draw benchmarks/results/ring_vs_native-*.json: bus bandwidth over size, a panel per MPI.

python benchmarks/plots/ring_vs_native.py        (needs the extra: pip install 'hpctrain[docs]')
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt

from hpctrain.core.palette import COLORS
from hpctrain.tools.bench.plot import format_size_axes

BENCHMARKS = Path(__file__).parents[1]
STYLE = {"ring": ("o-", COLORS[0], "hpctrain ring"),
         "plain-ring": ("s--", COLORS[1], "ring, uncut chunks"),
         "native": ("x:", COLORS[6], "MPI_Allreduce in place")}  # fmt: skip


def main() -> None:
    files = sorted(BENCHMARKS.glob("results/ring_vs_native-*.json"))
    figure, panels = plt.subplots(1, len(files), figsize=(9, 3.6), sharey=True, squeeze=False)
    for panel, file in zip(panels[0], files, strict=True):
        report = json.loads(file.read_text())
        for name, (line_style, color, label) in STYLE.items():
            rows = [row for row in report["rows"] if row["algorithm"] == name]
            sizes = [row["bytes"] for row in rows]
            panel.plot(sizes, [row["busbw"] for row in rows], line_style, color=color, label=label)
        format_size_axes(panel, sizes[:-1], "busbw [GB/s]")  # a label at 128 MiB would overlap
        panel.set(title=f"{report['machine']['mpi']}, 2 ranks", yscale="linear")
        panel.label_outer()
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(BENCHMARKS / "results" / "ring_vs_native.png", dpi=110)


if __name__ == "__main__":
    main()
