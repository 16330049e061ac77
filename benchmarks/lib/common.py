"""Ranks, clocks, spread and facts of the machine for all benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.cluster.launch import launch_program
from hpctrain.core import launchers
from hpctrain.transport.machine import facts
from hpctrain.tuning.measure import median_ratio, summarize_times, time_interleaved
from hpctrain.world import World, init
from lib.results import RESULTS, write_text

__all__ = [
    "RESULTS",
    "time_interleaved",
    "machine_facts",
    "make_parser",
    "median_ratio",
    "report_result",
    "save_result",
    "short_text",
    "summarize_times",
    "start_world",
]


def start_world(ranks: int) -> World:
    """Return the World of `ranks` ranks; started alone, start this script on them and leave."""
    if launchers.launched(os.environ).size == 1 and ranks > 1:
        sys.exit(launch_program(ranks, [sys.executable, *sys.argv]))
    return init()


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return the parser that every benchmark begins with."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30, help="times each rival is measured")
    return parser


def machine_facts(world: World) -> dict[str, Any]:
    """Return what a reader needs to know of where a result was measured."""
    return facts(world.hosts, world.transport)


def report_result(
    world: World,
    name: str,
    rows: Sequence[Mapping[str, Any]],
    claims: Mapping[str, bool],
    **about: Any,
) -> None:
    """Print the rows and whether the claims hold; keep all of it in results/NAME-MPI.json.

    Rank 0 writes. Every rank leaves with exit code 1 if a claim does not hold.
    """
    if world.rank == 0:
        save_result(name, {"machine": machine_facts(world), **about}, rows, claims)
    if not all(claims.values()):
        sys.exit(1)


def save_result(
    name: str,
    about: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    claims: Mapping[str, bool],
) -> None:
    """Do the same as `report_result` in a process that is no rank; `about` has the machine."""
    mpi = about["machine"]["mpi"].rsplit(maxsplit=1)[0].lower().replace(" ", "")
    document = {**about, "claims": dict(claims), "rows": list(rows)}
    path = write_text(RESULTS / f"{name}-{mpi}.json", json.dumps(document, indent=1) + "\n")
    print(f"-> {path.name}")
    for row in rows:
        print("  ".join(f"{key}={short_text(v)}" for key, v in row.items()))
    for claim, is_held in claims.items():
        print("holds:" if is_held else "DOES NOT HOLD:", claim)
    sys.stdout.flush()  # once another rank has left with 1, a launcher may kill this one


def short_text(value: Any) -> str:
    """Return a value as a table shows it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
