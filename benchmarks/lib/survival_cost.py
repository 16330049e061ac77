"""The cost of survival while no rank is lost: with and without ULFM, beside another checkout."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lib.survival_job import RANKS, STEP_MS, TRAIN, Job, count_cores, mpirun, progress, settings

STEPS = 200  #: of a job, after WARM_UP_STEPS
WARM_UP_STEPS = 30
SIZES = {"4B": 4, "64KiB": 1 << 16, "64MiB": 1 << 26}
MAX_SHARE = 0.02


def against_plain(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, bool]]:
    """Return the seconds of a step with and without ULFM, in turn.

    Of four ranks, and of as many as there are cores.
    """
    rows, claims = [], {}
    for part, ranks in (("elastic", RANKS), ("elastic on free cores", count_cores())):
        seconds: dict[str, list[float]] = {"plain": [], "elastic": []}
        for _ in range(arguments.rounds):
            for name, series in seconds.items():
                series.append(step_s(ranks, elastic=name == "elastic"))
        rows.append({"part": part, "ranks": ranks, **compare(seconds, "elastic", "plain")})
        share = rows[-1]["ratio"] - 1
        claim = f"{part}: a step of {STEP_MS} ms takes {share:+.2%}, <= {MAX_SHARE:.0%}"
        claims[claim] = share <= MAX_SHARE
    return rows, claims


def step_s(ranks: int, elastic: bool) -> float:
    """Return the mean seconds of a step."""
    with (
        tempfile.TemporaryDirectory() as out,
        Job([*TRAIN, "--out", out, "--resume"], ranks, elastic=elastic) as job,
    ):
        job.await_steps(ranks, STEPS + WARM_UP_STEPS)
        times, _ = progress(list(job.events().values()))
    return float(times[WARM_UP_STEPS + STEPS - 1] - times[WARM_UP_STEPS - 1]) / STEPS


def compare(seconds: Mapping[str, list[float]], name: str, rival: str) -> dict[str, Any]:
    """Return both medians, and median and range of the ratios of neighbours in time."""
    ratios = np.array(seconds[name]) / np.array(seconds[rival])
    return {
        f"{name}_s": float(np.median(seconds[name])),
        f"{rival}_s": float(np.median(seconds[rival])),
        "ratio": float(np.median(ratios)), "least": float(ratios.min()),
        "most": float(ratios.max()), "rounds": len(ratios), "seconds": dict(seconds),
    }  # fmt: skip


def against_checkout(
    arguments: argparse.Namespace,
) -> tuple[list[dict[str, Any]], dict[str, bool]]:
    """Return steps and all-reduces without ULFM of this checkout and of another, in turn."""
    folders = {"here": Path(__file__).parents[2], "there": Path(arguments.folder).resolve()}
    table: dict[str, dict[str, list[float]]] = {}
    for _ in range(arguments.rounds):
        for name, folder in folders.items():
            for what, value in measure_checkout(folder).items():
                table.setdefault(what, {}).setdefault(name, []).append(value)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folders["there"],
                            capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    rows = [
        {"part": what, "there": commit, **compare(series, "here", "there")}
        for what, series in table.items()
    ]
    claims = {
        f"{row['part']}: {row['ratio']:.3f} of the time at {commit}, <= 1.02": row["ratio"] <= 1.02
        for row in rows
    }
    return rows, claims


def measure_checkout(folder: Path) -> dict[str, float]:
    """Return the seconds of a step of `digits` and of all-reduces, on two ranks."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    python = [*mpirun(2, elastic=False), sys.executable, "-m", "hpctrain"]
    with tempfile.TemporaryDirectory() as out:
        file = Path(out, "bench.json")
        bench = ["bench", "allreduce", "--sizes", ",".join(SIZES), "--algorithms", "auto",
                 "--json", str(file)]  # fmt: skip
        train = ["train", "digits", "--epochs", "150", "--out", str(Path(out, "run")),
                 *settings("run.evaluate_epochs=150", "checkpoint.every_epochs=150")]  # fmt: skip
        for command in (bench, train):
            subprocess.run([*python, *command], cwd=folder, env=environment, check=True,
                           capture_output=True)  # fmt: skip
        rows = json.loads(file.read_text())["rows"]
        summary = json.loads(Path(out, "run", "summary.json").read_text())
    of_size = {row["bytes"]: row["median_s"] for row in rows if row["algorithm"] == "auto"}
    allreduces = {f"all-reduce of {name}": of_size[size] for name, size in SIZES.items()}
    return {"step of digits": summary["wall_s"] / summary["steps"], **allreduces}
