"""Runs the whole comparison under two MPIs in turn, several times each, and merges what they say.

    python benchmarks/compare.py OPENMPI_ENVIRONMENT MPICH_ENVIRONMENT [--times 5] [--ranks 2]

An environment is a virtual environment with hpctrain and one MPI; Horovod and PyTorch are measured
where it has them (benchmarks/install_horovod.sh). Each run is `hpctrain bench` in a job of its own.
Per size the better native median of both MPIs is the rival: a user could have either. What `auto`
adds to a call is seen against the native of its own MPI (`own native`).

    results/compare-PART-N-ranks.json   all runs, what was merged, claims
    results/compare-PART-N-ranks.png    PART: allreduce (arrays in node memory, where gradients
                                        are), private (elsewhere), step (whole training steps)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.bench import plot
from hpctrain.bench.sizes import shown

HERE = Path(__file__).parent
KIB = 1 << 10
NOT_DRAWN = ("ring", "auto-bound")  # near others: more lines would hide them
RIVALS = ["--rivals", "horovod,gloo"]
PARTS: dict[str, list[str]] = {
    "allreduce": ["allreduce", "--algorithms", "auto,auto-bound,direct,direct-shared,ring,native",
                  *RIVALS],
    "private": ["allreduce", "--algorithms", "auto,direct,ring,native", "--buffers", "private"],
    "step": ["step", str(HERE / "mlp-10m.toml"), "--batch-per-rank", "32,128",
             "--algorithms", "auto,direct,share-parameters,native", *RIVALS],
}  # fmt: skip
#: (part, ranks): (ours, rival, sizes from, to, geometric mean or every single one, at least)
CLAIMS: dict[tuple[str, int], list[tuple[str, str, int, int, str, float]]] = {
    ("allreduce", 2): [
        ("direct-shared", "native", 256 * KIB, 128 * KIB * KIB, "mean", 4.0),
        ("direct", "native", 256 * KIB, 128 * KIB * KIB, "mean", 3.0),
        ("direct", "native", 8 * KIB, 8 * KIB, "each", 1.9),
        ("auto-bound", "own native", 4, 128 * KIB * KIB, "each", 0.95),
        ("auto", "own native", 4, 2 * KIB, "each", 0.9),
        ("auto", "horovod", 4, 128 * KIB * KIB, "mean", 5.0),
        ("auto", "gloo", 4, 128 * KIB * KIB, "mean", 5.0),
    ],
    ("allreduce", 4): [
        ("direct-shared", "native", 256 * KIB, 128 * KIB * KIB, "mean", 2.8),
        ("direct", "native", 256 * KIB, 128 * KIB * KIB, "mean", 2.3),
    ],
    ("private", 2): [
        ("auto", "own native", 4, 128 * KIB * KIB, "each", 0.95),
        ("auto", "native", 8 * KIB * KIB, 128 * KIB * KIB, "each", 1.2),
    ],
    ("step", 2): [
        ("auto", "gloo", 32, 32, "each", 1.4),
        ("auto", "gloo", 128, 128, "each", 1.25),
        ("share-parameters", "gloo", 32, 32, "each", 1.7),
        ("share-parameters", "gloo", 128, 128, "each", 1.4),
    ],
}
Row = dict[str, Any]


def main() -> None:
    arguments = _arguments()
    fine = True
    for part in arguments.parts.split(","):
        runs = list(_runs(part, arguments))
        merged = merge([run["rows"] for run in runs], [_mpi(run) for run in runs], part)
        held = claims(part, arguments.ranks, merged)
        _keep(part, arguments.ranks, runs, merged, held)
        fine = fine and all(held.values())
    sys.exit(0 if fine else 1)


def _arguments() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("environments", nargs="+", type=Path)
    parser.add_argument("--times", type=int, default=5, help="runs of each environment")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="4B:128MiB")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--parts", default=",".join(PARTS))
    return parser.parse_args()


def _runs(part: str, arguments: argparse.Namespace) -> Iterable[dict[str, Any]]:
    sizes = [] if part == "step" else ["--sizes", arguments.sizes]
    rest = [*PARTS[part], *sizes, "--iterations", str(arguments.iterations)]
    for number in range(arguments.times):
        for environment in arguments.environments:
            print(f"{part}: run {number + 1} of {arguments.times}, {environment}", flush=True)
            yield _run(environment, arguments.ranks, rest)


def _run(environment: Path, ranks: int, rest: Sequence[str]) -> dict[str, Any]:
    """Return what one job kept; end where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "rows.json")
        launch = [environment / "bin" / "python", "-m", "hpctrain", "launch", "-n", str(ranks)]
        path = f"{environment / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        job = subprocess.run(
            [*map(str, launch), "bench", *rest, "--json", str(kept)],
            env={**os.environ, "PATH": path},
            stdout=subprocess.DEVNULL,
        )
        if job.returncode:
            sys.exit(f"{environment}: hpctrain bench ended with {job.returncode}")
        found: dict[str, Any] = json.loads(kept.read_text())
        return found


def merge(runs: Sequence[Sequence[Row]], mpis: Sequence[str], part: str) -> list[Row]:
    """Return a row per MPI, algorithm and size: the median over runs of the medians.

    `times`: how many times faster it is than each rival, of which each is taken under the MPI
    under which it is faster, and than the native of its own MPI.
    """
    at = "batch_per_rank" if part == "step" else "bytes"
    cells: dict[tuple[str, str, int], list[Row]] = {}
    for rows, mpi in zip(runs, mpis, strict=True):
        for row in rows:
            cells.setdefault((mpi, row["algorithm"], row[at]), []).append(row)
    merged = [_merged(mpi, found) for (mpi, _, _), found in cells.items()]
    for row in merged:
        same = [other for other in merged if other[at] == row[at]]
        row["times"] = {
            rival: min(r["median_s"] for r in same if r["algorithm"] == rival) / row["median_s"]
            for rival in ("native", "horovod", "gloo")
            if any(r["algorithm"] == rival for r in same)
        }
        for own in same:
            if (own["algorithm"], own["mpi"]) == ("native", row["mpi"]):
                row["times"]["own native"] = own["median_s"] / row["median_s"]
    return merged


def _merged(mpi: str, found: Sequence[Row]) -> Row:
    medians = [row["median_s"] for row in found]
    row = {key: found[0].get(key) for key in ("operation", "algorithm", "bytes", "ranks")}
    if "batch_per_rank" in found[0]:
        exposed = [r["exposed_s"] for r in found if r["exposed_s"] is not None]
        row["batch_per_rank"] = found[0]["batch_per_rank"]
        row["alone_s"] = float(np.median([r["alone_s"] for r in found]))
        row["exposed_s"] = float(np.median(exposed)) if exposed else None
        row["samples_per_s"] = float(np.median([r["samples_per_s"] for r in found]))
    else:
        row["busbw"] = float(np.median([r["busbw"] for r in found]))
        row["share_of_floor"] = float(np.median([r["share_of_floor"] for r in found]))
    return row | {
        "mpi": mpi,
        "runs": len(found),
        "median_s": float(np.median(medians)),
        "p5_s": min(medians),  # over runs: the fastest and the slowest
        "p95_s": max(medians),
        "correct": all(r["correct"] for r in found),
    }


def claims(part: str, ranks: int, merged: Sequence[Row]) -> dict[str, bool]:
    """Return {claim: whether it holds}; each under every MPI."""
    held = {f"{part}: all results are right": all(row["correct"] for row in merged)}
    for ours, rival, low, high, how, least in CLAIMS.get((part, ranks), []):
        for mpi in sorted({row["mpi"] for row in merged}):
            ratios = _ratios(merged, part, ours, rival, mpi, low, high)
            if ratios:
                held |= _claim(part, f"{ours}, {mpi}", rival, ratios, how, least)
    return held


def _ratios(
    merged: Sequence[Row], part: str, ours: str, rival: str, mpi: str, low: int, high: int
) -> dict[int, float]:
    at = "batch_per_rank" if part == "step" else "bytes"
    return {
        row[at]: row["times"][rival]
        for row in merged
        if (row["algorithm"], row["mpi"]) == (ours, mpi)
        and low <= row[at] <= high
        and rival in row["times"]
    }


def _claim(
    part: str, ours: str, rival: str, ratios: Mapping[int, float], how: str, least: float
) -> dict[str, bool]:
    show: Callable[[int], str] = str if part == "step" else shown
    sizes = f"{show(min(ratios))} .. {show(max(ratios))}" if len(ratios) > 1 else show(min(ratios))
    if how == "mean":
        value = float(np.exp(np.mean(np.log(list(ratios.values())))))
        what = "geometric mean"
    else:
        worst = min(ratios, key=lambda size: ratios[size])
        value, what = ratios[worst], f"least, at {show(worst)}"
    return {f"{part}: {ours} {value:.2f}x {rival} ({what}, {sizes}), >= {least}": value >= least}


def _mpi(run: Mapping[str, Any]) -> str:
    return str(run["machine"]["mpi"]).rsplit(maxsplit=1)[0]


def _keep(
    part: str, ranks: int, runs: Sequence[Any], merged: Sequence[Row], held: Mapping[str, bool]
) -> None:
    name = f"compare-{part}-{ranks}-ranks"
    path = HERE / "results" / f"{name}.json"
    path.write_text(json.dumps({"claims": held, "merged": merged, "runs": runs}, indent=1) + "\n")
    named = [
        {**row, "algorithm": f"{row['algorithm']}, {row['mpi']}"}
        for row in merged
        if row["algorithm"] not in NOT_DRAWN
    ]
    draw = plot.bars if part == "step" else plot.draw
    draw(named, f"{part}, {ranks} ranks on 1 node", path.with_suffix(".png"))
    for claim, holds in held.items():
        print("holds:" if holds else "DOES NOT HOLD:", claim)
    print(f"-> {path.name}, {path.stem}.png")


if __name__ == "__main__":
    main()
