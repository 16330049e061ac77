"""What all benchmarks share: ranks, clocks, spread, and the facts of the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain import launchers
from hpctrain.cluster.launch import launch_argv
from hpctrain.collectives import all_gather_short
from hpctrain.journal import blas_threads, versions
from hpctrain.transport.link import Link
from hpctrain.transport.probe import loaded_mpi
from hpctrain.world import World, init

RESULTS = Path(__file__).parent / "results"


def world_of(ranks: int) -> World:
    """Return the World of `ranks` ranks; started alone, start this script on them and leave."""
    if launchers.launched(os.environ).size == 1 and ranks > 1:
        sys.exit(launch_argv(ranks, [sys.executable, *sys.argv]))
    return init()


def options(description: str) -> argparse.ArgumentParser:
    """Return the parser that every benchmark begins with."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30, help="times each rival is measured")
    return parser


def timed(link: Link, function: Callable[[], Any]) -> float:
    """Return the seconds that the slowest rank spends in `function`, all starting together."""
    link.barrier()
    start = time.perf_counter()
    function()
    mine = np.array([time.perf_counter() - start])
    return float(all_gather_short(link, mine.view(np.uint8)).view(np.float64).max())


def interleaved(
    link: Link, rivals: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 3
) -> dict[str, list[float]]:
    """Return the seconds of each rival, taken in turn: A B C A B C ..., each after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for round_ in range(warm_up + rounds):
        for name, function in rivals.items():
            one = timed(link, function)
            if round_ >= warm_up:
                seconds[name].append(one)
    return seconds


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return median and percentiles in seconds."""
    p5, median, p95, p99 = np.percentile(seconds, [5, 50, 95, 99]).tolist()
    return {"median_s": median, "p5_s": p5, "p95_s": p95, "p99_s": p99}


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the median of a/b over pairs measured next to each other."""
    return float(np.median(np.array(a) / np.array(b)))


def machine(world: World) -> dict[str, Any]:
    """Return what a reader needs to know of where a result was measured."""
    mpi = loaded_mpi()
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "cores_per_rank": len(os.sched_getaffinity(0)),
        "os": platform.platform(),
        "hosts": len(set(world.hosts)),
        "mpi": f"{mpi.vendor} {mpi.version}" if world.transport == "mpi" else "none: threads",
        "blas_threads": blas_threads(),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d"),
    }


def write(
    world: World,
    name: str,
    rows: Sequence[Mapping[str, Any]],
    claims: Mapping[str, bool],
    **facts: Any,
) -> None:
    """Print the rows and whether the claims hold; keep all of it in results/NAME-MPI.json.

    Rank 0 writes. Every rank leaves with exit code 1 if a claim does not hold.
    """
    if world.rank == 0:
        _keep(
            name, {"machine": machine(world), **facts, "claims": dict(claims), "rows": list(rows)}
        )
        for row in rows:
            print("  ".join(f"{k}={short(v)}" for k, v in row.items()))
        for claim, holds in claims.items():
            print("holds:" if holds else "DOES NOT HOLD:", claim)
    if not all(claims.values()):
        sys.exit(1)


def _keep(name: str, found: Mapping[str, Any]) -> None:
    mpi = found["machine"]["mpi"].rsplit(maxsplit=1)[0].lower().replace(" ", "")
    path = RESULTS / f"{name}-{mpi}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"-> {path.name}")


def short(value: Any) -> str:
    """Return a value as a table shows it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((s.split(":")[1].strip() for s in lines if s.startswith("model name")), "unknown")
