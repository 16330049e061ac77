"""Draw benchmarks/results/survival-*-openmpi.json: times of recoveries, and the useful time.

python benchmarks/plots/survival.py             (needs the extra: pip install 'hpctrain[docs]')
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import NullFormatter

from hpctrain.core.palette import COLORS, DASHES, MARKERS

sys.path.insert(0, str(Path(__file__).parents[1]))
from lib.results import RESULTS, read_text
from lib.survival_ettr import daly

LABELS = {
    "bare": "MPI alone: revoke, shrink, all-reduce", "fast on free cores": "allreduce, a core each",
    "ordered on free cores": "ordered sums, a core each", "fast": "allreduce",
    "ordered": "allreduce, ordered sums", "shards": "allreduce, shard_optimizer",
    "ps-sync": "ps-sync", "local-sgd": "local-sgd", "restart": "restart from a checkpoint",
}  # fmt: skip
VARIANTS = {
    "spares": "a spare for each loss", "one spare": "one spare, then a restart",
    "restart": "restarts alone",
}  # fmt: skip
TICKS_MS = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
PERIODS_S = {"5 s": 5, "30 s": 30, "1 min": 60, "5 min": 300, "20 min": 1200, "1 h": 3600}


def result(study: str) -> dict[str, Any]:
    return json.loads(read_text(RESULTS / f"survival-{study}-openmpi.json"))


def draw_kills(report: dict[str, Any]) -> None:
    """Draw the share of kills after which the next step was complete, over the time."""
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    rows = {row["part"]: row for row in report["rows"]}
    for i, (name, label) in enumerate(LABELS.items()):
        if name not in rows:
            continue
        times = np.sort([kill["next_step_s"] for kill in rows[name]["each"]]) * 1e3
        share = np.arange(1, len(times) + 1) / len(times)
        axes.step(times, share, where="post", color=COLORS[i], linestyle=DASHES[i % len(DASHES)],
                  marker=MARKERS[i], markevery=max(1, len(times) // 6), markersize=5,
                  label=label)  # fmt: skip
    axes.set(xscale="log", ylim=(0, 1.02), ylabel="share of the kills",
             xlabel="time from SIGKILL to the next completed step of all survivors [ms]",
             title=f"{report['ranks']} ranks on {report['machine']['cores']} cores, "
                   f"steps of {report['step_ms']} ms")  # fmt: skip
    longest_ms = max(1e3 * row["max_s"] for row in rows.values())
    ticks = [tick for tick in TICKS_MS if tick < 2.5 * longest_ms]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(10, ticks[-1])
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(RESULTS / "survival-kills.png", dpi=110)


def draw_ettr(report: dict[str, Any]) -> None:
    """Draw the useful part of the time over the time between faults, beside Young and Daly's."""
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    rows = report["rows"]
    periods = np.geomspace(min(row["period_s"] for row in rows) / 2, 3600, 200)
    checkpoint_s = float(np.median([row["checkpoint_s"] for row in rows]))
    restart_s = float(np.median([row["restart_s"] for row in rows]))
    expected = [daly(math.sqrt(2 * checkpoint_s * m), checkpoint_s, restart_s, m) for m in periods]
    axes.plot(periods, expected, color=COLORS[6], linestyle="--",
              label=f"expected of restarts (Young, Daly)\nfor checkpoints of "
                    f"{1e3 * checkpoint_s:.0f} ms, restarts of {restart_s:.1f} s")  # fmt: skip
    for i, (variant, label) in enumerate(VARIANTS.items()):
        points = sorted((row["period_s"], row["ettr"], row["goodput"])
                        for row in rows if row["variant"] == variant)  # fmt: skip
        if points:
            periods_s, ettr, goodput = zip(*points, strict=True)
            style = {"linestyle": "", "marker": MARKERS[i], "markersize": 9, "color": COLORS[i]}
            axes.plot(periods_s, ettr, label=f"ETTR: {label}", **style)
            axes.plot(periods_s, goodput, markerfacecolor="none", **style)
    axes.set(xscale="log", ylim=(0, 1.03), xlabel="mean time between faults",
             ylabel="part of the time with progress\n(hollow: with steps of median length)",
             title=f"{report['ranks']} ranks on {report['machine']['cores']} cores")  # fmt: skip
    axes.set_xticks(list(PERIODS_S.values()), list(PERIODS_S))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(RESULTS / "survival-ettr.png", dpi=110)


if __name__ == "__main__":
    draw_kills(result("kills"))
    draw_ettr(result("ettr"))
