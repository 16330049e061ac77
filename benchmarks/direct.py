"""Claims: inside a node, sums out of neighbours' memory are several times faster than MPI's own.

    python benchmarks/direct.py [--ranks 2] [--rounds 15] [--sizes 4,8192,...]

Per size, in turn within one run, float32, all through bound calls (`hpctrain.arrays.bind`):
- native: MPI's own in place, as mpi4py binds it (nothing of ours);
- shared, in-place: `direct` on arrays of `world.zeros`, into one result for all or into all;
- plain: `direct` on an array that neighbours do not see;
- auto, auto-plain: what the model or `hpctrain tune` chose, for either array;
- call: the plain call `allreduce(x, check=False)`.
From 64 MiB on also the memory floors: all ranks stream `a += b` over private arrays, for as many
bytes as one shared result moves, (P + 1) n, and as writing back does, 2 P n.

Ratios are medians of pairs measured next to each other. Another MPI library's native may be the
faster one: run this under both; `benchmarks/results` then has a file of each, to be joined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from _common import interleaved, options, paired_ratio, world_of, write

from hpctrain.arrays import allreduce, bind
from hpctrain.world import World

SIZES = [4, 64, 1 << 10, 4 << 10, 8 << 10, 32 << 10, *(1 << k for k in range(18, 28))]
FLOOR_FROM = 64 << 20
ENOUGH_S = 2e-4  # of back-to-back calls between two looks at the clock
GOALS = {2: {"shared": 4.0, "in-place": 3.0}, 4: {"shared": 2.8, "in-place": 2.3}}


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(rounds=15)
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")])
    arguments = parser.parse_args()
    world = world_of(arguments.ranks)
    sizes = arguments.sizes or SIZES
    rows = [row for n in sizes for row in measured(world, n, arguments.rounds)]
    write(world, f"direct-{world.size}-ranks", rows, claims(rows, world.size))


def measured(world: World, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each rival at this size."""
    rivals = calls(world, nbytes)
    repeats = max(1, min(300, int(ENOUGH_S / (5e-7 + nbytes * 2e-11))))
    seconds = interleaved(world.link, rivals, rounds, calls=repeats)
    floors = {"shared": "floor-shared", "in-place": "floor-in-place"}
    return [
        {
            "bytes": nbytes,
            "what": name,
            "median_s": float(np.median(found)),
            "times_native": paired_ratio(seconds["native"], found),
            "share_of_floor": paired_ratio(seconds[floors[name]], found)
            if name in floors and floors[name] in seconds
            else None,
            "seconds": found,
        }
        for name, found in seconds.items()
    ]


def calls(world: World, nbytes: int) -> Mapping[str, Callable[[], object]]:
    """Return what is called at this size, each on arrays of its own."""
    n = nbytes // 4
    seen, plain = world.zeros(n), np.zeros(n, np.float32)
    native = world.link.native_call("allreduce", np.zeros(n, np.float32), np.add).call
    rivals = {
        "native": native,
        "shared": bind(seen, algorithm="direct", result="shared", world=world),
        "in-place": bind(seen, algorithm="direct", world=world),
        "plain": bind(plain, algorithm="direct", world=world),
        "auto": bind(seen, world=world),
        "auto-plain": bind(plain, world=world),
        "call": lambda: allreduce(plain, world=world, check=False),
    }
    return rivals | floors(world.size, n) if nbytes >= FLOOR_FROM else rivals


def floors(ranks: int, n: int) -> Mapping[str, Callable[[], object]]:
    """Return our part of streaming as many bytes as `direct` moves; `a += b` moves three arrays."""
    length = {"floor-shared": (ranks + 1) * n // (3 * ranks), "floor-in-place": 2 * n // 3}
    a, b = np.ones((2, max(length.values())), np.float32)  # written once: pages of their own
    b[:] = 0
    return {name: lambda m=m: np.add(a[:m], b[:m], out=a[:m]) for name, m in length.items()}  # type: ignore[misc]


def claims(rows: list[dict[str, Any]], ranks: int) -> dict[str, bool]:
    """Return what is claimed and whether it holds, where the sizes for it were measured."""
    told = {}
    for what, goal in GOALS.get(ranks, {}).items():
        if ratios := [r["times_native"] for r in of(rows, what) if r["bytes"] >= 256 << 10]:
            mean = float(np.exp(np.mean(np.log(ratios))))
            told[f"{what}: geometric mean {mean:.2f}x native from 256 KiB, >= {goal}"] = (
                mean >= goal
            )
    limits = [("auto", 1, 0.95), ("auto-plain", 1, 0.95), ("plain", 4096, 0.95), ("call", 1, 0.9)]
    for what, start, goal in limits:
        upto = 4096 if what == "call" else 1 << 40
        ratios = [r["times_native"] for r in of(rows, what) if start <= r["bytes"] < upto]
        if ratios:
            told[f"{what}: at least {min(ratios):.2f}x native, >= {goal}"] = min(ratios) >= goal
    shares = [r["share_of_floor"] for r in rows if r["share_of_floor"] is not None]
    if shares:
        told[f"at least {min(shares):.2f} of the memory floor, >= 0.9"] = min(shares) >= 0.9
    return told


def of(rows: list[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["what"] == what]


if __name__ == "__main__":
    main()
