"""Claim: after `hpctrain tune`, `auto` is within 10 % of the best fixed algorithm at every size.

    python benchmarks/auto.py [--ranks 2] [--rounds 15]

First what `hpctrain tune` does, then, in the same run, every algorithm that is not hopeless beside
`auto`, all through bound calls on the same array, taken in turn; arrays in node memory and plain
ones. The sizes lie on and between those that were tuned. The ratio is the median of paired ratios
to whichever fixed algorithm has the best median: chosen afterwards, so luck is on its side.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from _common import interleaved, options, paired_ratio, spread, world_of, write

from hpctrain.bench.message_sizes import parse, size_text
from hpctrain.bench.sweep import calls_per_round
from hpctrain.bench.tuning.command import DEFAULT_LIMIT_S, DEFAULT_ROUNDS, DEFAULT_SIZES
from hpctrain.collectives import Group
from hpctrain.tuning import choose, select, sweep
from hpctrain.tuning.measure import timed
from hpctrain.world import World

MOST = 1.10
ASKED = "4B,48B,1KiB,3KiB,8KiB,12KiB,32KiB,48KiB,128KiB,384KiB,1MiB,3MiB,8MiB,24MiB,64MiB"
LOOK_ROUNDS = 3


def main() -> None:
    arguments = options(__doc__).parse_args()
    world = world_of(arguments.ranks)
    tuned = parse(DEFAULT_SIZES)
    *_, rows = sweep.sweep(world.main, tuned, DEFAULT_ROUNDS, DEFAULT_LIMIT_S)
    plan = choose.plan(rows, (), measured=True)
    group = replace(world.main, choices=choose.choices(plan))
    arrays = sweep.arrays(group, max(tuned))
    found = [
        one_size(world, group, nbytes, in_memory, x[: nbytes // 4], arguments.rounds)
        for nbytes in parse(ASKED)
        for in_memory, x in arrays.kinds
    ]
    worst = max(found, key=lambda row: row["auto_to_best"])
    claims = {
        f"auto takes at most {worst['auto_to_best']:.3f} of the best fixed algorithm "
        f"({worst['best']}, {size_text(worst['bytes'])}), <= {MOST}": worst["auto_to_best"] <= MOST
    }
    stairs = {"kept": plan.in_node_memory, "plain": plan.default}
    write(world, f"auto-{world.size}-ranks", found, claims, steps=json.dumps(stairs))


def one_size(
    world: World, group: Group, nbytes: int, in_memory: bool, x: np.ndarray, rounds: int
) -> dict:
    """Return the row of one size: `auto` beside the best of the others."""
    names = ["auto", *sweep.applicable(group)]
    calls = {name: select.bound(group, x, np.add, name) for name in names}
    batch = calls_per_round(nbytes)
    looked = interleaved(world.link, calls, LOOK_ROUNDS, calls=batch)
    late = sweep.slower(looked, sweep.DROP_RATIO) - {"auto"}
    rivals = {name: call for name, call in calls.items() if name not in late}
    seconds = shuffled(world, rivals, rounds, batch)
    medians = {name: float(np.median(taken)) for name, taken in seconds.items()}
    best = min((name for name in medians if name != "auto"), key=medians.__getitem__)
    return {
        "bytes": nbytes,
        "in_memory": in_memory,
        "ranks": world.size,
        "rounds": rounds,
        "takes": select.name_of(select.auto, group, x),
        "best": best,
        "auto_to_best": paired_ratio(seconds["auto"], seconds[best]),
        "auto": spread(seconds["auto"]),
        "fixed_s": {name: s for name, s in medians.items() if name != "auto"},
    }


def shuffled(
    world: World, rivals: dict[str, Callable[[], Any]], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Return the seconds of each rival, in another order in each round.

    Whoever always ran after a certain other would always find the caches that one leaves.
    """
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    order, random = list(rivals), Random(0)  # the same on all ranks
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            seconds[name].append(timed(world.link, rivals[name], calls))
    return seconds


if __name__ == "__main__":
    main()
