"""What all benchmarks share: ranks, clocks, spread, and the facts of the machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.cluster.launch import launch_program
from hpctrain.core import launchers
from hpctrain.machine import facts
from hpctrain.tuning.measure import interleaved, paired_ratio, spread
from hpctrain.world import World, init

__all__ = [
    "RESULTS",
    "interleaved",
    "keep",
    "machine",
    "options",
    "paired_ratio",
    "short",
    "spread",
    "world_of",
    "write",
]
RESULTS = Path(__file__).parent / "results"


def world_of(ranks: int) -> World:
    """Return the World of `ranks` ranks; started alone, start this script on them and leave."""
    if launchers.launched(os.environ).size == 1 and ranks > 1:
        sys.exit(launch_program(ranks, [sys.executable, *sys.argv]))
    return init()


def options(description: str) -> argparse.ArgumentParser:
    """Return the parser that every benchmark begins with."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30, help="times each rival is measured")
    return parser


def machine(world: World) -> dict[str, Any]:
    """Return what a reader needs to know of where a result was measured."""
    return facts(world.hosts, world.transport)


def write(
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
        keep(name, {"machine": machine(world), **about}, rows, claims)
    if not all(claims.values()):
        sys.exit(1)


def keep(
    name: str,
    about: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    claims: Mapping[str, bool],
) -> None:
    """Do what `write` does, in a process that is no rank; `about` has the facts of the machine."""
    mpi = about["machine"]["mpi"].rsplit(maxsplit=1)[0].lower().replace(" ", "")
    path = RESULTS / f"{name}-{mpi}.json"
    found = {**about, "claims": dict(claims), "rows": list(rows)}
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"-> {path.name}")
    for row in rows:
        print("  ".join(f"{k}={short(v)}" for k, v in row.items()))
    for claim, holds in claims.items():
        print("holds:" if holds else "DOES NOT HOLD:", claim)
    sys.stdout.flush()  # once another rank has left with 1, a launcher may kill this one


def short(value: Any) -> str:
    """Return a value as a table shows it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
