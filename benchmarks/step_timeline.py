"""Draws where the time of a step goes on two hosts, from traces: README's picture.

    python benchmarks/step_timeline.py [--link 1gbit] [--batch 500] [--draw]

Three runs of the same MLP (10 M parameters, 25 layers) on 2 hosts made by `hpctrain netlab`, with
`--trace`: gradients sent after backward, during backward, and in the order in which the next
forward pass needs them (`[wire] priority`). Of rank 0 DRAWN steps in a row are
drawn, the ones whose mean is nearest to the median of the run, which the title has.

    results/step-timeline-MPI.json      seconds per step of each run, and its spans
    results/step-timeline.png           the picture; with --draw from the results that there are
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import tomli_w
from lib.common import RESULTS, save_result
from lib.results import read_text

from hpctrain.cluster.netlab.netlab import Lab, netlab, parse_speed
from hpctrain.core.palette import BLACK, BLUE, ORANGE
from hpctrain.transport.machine import facts

WIDTHS = [784, *[640] * 24, 10]
STEPS, FIRST, DRAWN = 12, 6, 3
RUNS: dict[str, dict[str, Any]] = {
    "after backward": {"overlap": "never"},
    "during backward": {"overlap": "always"},
    "in the order of the next forward": {"priority": True},
}
#: spans of the main thread that are drawn as compute; those of the wire are named `bucket N`
COMPUTE = {"forward, backward": BLUE, "update": BLACK}
PICTURE = RESULTS / "step-timeline.png"


def main() -> int:
    options = parse_arguments()
    if not options.draw:
        measure(options.link, options.batch)
    result = json.loads(read_text(RESULTS / "step-timeline-openmpi.json"))
    draw(result["rows"], result["pictures"])
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", default="1gbit", help="rate of each host's link")
    parser.add_argument("--batch", type=int, default=500, help="samples per rank")
    parser.add_argument("--draw", action="store_true", help="only draw what was measured")
    return parser.parse_args()


def measure(link: str, batch: int) -> None:
    """Train once per row of RUNS, and keep what was measured."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # hosts share the cores of this machine
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, wire) in enumerate(RUNS.items()):
            recipe, run = Path(folder) / f"{number}.toml", Path(folder) / str(number)
            recipe.write_text(tomli_w.dumps(make_recipe(batch, wire)))
            command = [sys.executable, "-m", "hpctrain", "train", str(recipe), "--trace"]
            if code := netlab(Lab(2, 1, parse_speed(link)), [*command, "--out", str(run)]):
                sys.exit(code)
            runs[name] = read_run(name, run)
    about = {
        "machine": facts(["h1", "h2"], "mpi"),
        "link": link,
        "batch_per_rank": batch,
        "pictures": {name: picture for name, (_, picture) in runs.items()},
    }
    save_result("step-timeline", about, [row for row, _ in runs.values()], {})


def make_recipe(batch: int, wire: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": 1,
        "run": {"name": "timeline", "steps": STEPS, "evaluate_steps": STEPS},
        "model": {"kind": "mlp", "widths": WIDTHS},
        "data": {"kind": "mnist"},
        "optimizer": {"kind": "sgd", "rate": 0.01, "batch_per_rank": batch},
        "wire": {"algorithm": "ring", **wire},
    }


def read_run(name: str, run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the row of a run, and its picture: spans of rank 0 as [name, from, to], in ms."""
    events = [
        e for e in json.loads((run / "trace.json").read_text())["traceEvents"] if not e["pid"]
    ]
    starts = [e["ts"] for e in events if e["ph"] == "i"]
    end = starts[FIRST + DRAWN + 2]
    spans = [
        [e["name"], *(round((t - starts[FIRST]) / 1e3, 2) for t in (e["ts"], e["ts"] + e["dur"]))]
        for e in events
        if e["ph"] == "X" and (e["name"] in COMPUTE or e["name"].startswith("bucket"))
        if starts[FIRST - 1] < e["ts"] < end
    ]
    steps_ms = [(late - early) / 1e3 for early, late in pairwise(starts[2:])]
    times = {"median_s": statistics.median(steps_ms) / 1e3,
             "min_s": min(steps_ms) / 1e3, "max_s": max(steps_ms) / 1e3}  # fmt: skip
    starts_ms = [round((start - starts[FIRST]) / 1e3, 2) for start in starts if start < end]
    return {"what": name, **times}, {"starts_ms": starts_ms, "spans": spans}


def find_typical_start(picture: dict[str, Any], median_ms: float) -> float:
    """Return the start of the DRAWN steps in a row whose mean is nearest to `median_ms`.

    Spans are kept from one step before FIRST on.
    """
    starts = picture["starts_ms"][FIRST - 1 :]
    windows = zip(starts, starts[DRAWN:], strict=False)
    return min(windows, key=lambda ends: abs((ends[1] - ends[0]) / DRAWN - median_ms))[0]


def draw(rows: list[dict[str, Any]], pictures: dict[str, Any]) -> None:
    """Draw a panel per run: what rank 0 computes, and its gradients on the wire."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(len(rows), sharex=True, figsize=(8, 4.2), layout="constrained")
    end = DRAWN * 1e3 * max(row["median_s"] for row in rows)
    for panel, row in zip(panels, rows, strict=True):
        picture = pictures[row["what"]]
        origin = find_typical_start(picture, row["median_s"] * 1e3)
        for name, start, stop in picture["spans"]:
            lane = 1 if name in COMPUTE else 0
            color = COMPUTE.get(name, ORANGE)
            panel.barh(
                lane,
                stop - start,
                left=start - origin,
                color=color,
                edgecolor="white",
                linewidth=0.5,
            )
        for start in picture["starts_ms"]:
            panel.axvline(start - origin, color="0.4", linewidth=0.8, linestyle=":")
        panel.set_title(
            f"gradients sent {row['what']}: a step takes {row['median_s'] * 1e3:.0f} ms (median)",
            loc="left",
        )
        panel.set_yticks([0, 1], ["wire", "compute"])
        panel.set_xlim(0, end)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("time [ms]; dotted: a step begins")
    names = {**COMPUTE, "gradients on the wire": ORANGE}
    patches = [plt.Rectangle((0, 0), 1, 1, color=color) for color in names.values()]
    figure.legend(patches, list(names), loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
