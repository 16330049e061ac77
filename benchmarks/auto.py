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
from lib.common import (
    make_parser,
    median_ratio,
    report_result,
    start_world,
    summarize_times,
    time_interleaved,
)

from hpctrain.collectives import Group
from hpctrain.tools.bench.sweep import calls_per_round
from hpctrain.tools.bench.tune import DEFAULT_LIMIT_S, DEFAULT_ROUNDS, DEFAULT_SIZES
from hpctrain.tools.bench.units import parse_sizes, size_text
from hpctrain.tuning import choose, select, sweep
from hpctrain.tuning.measure import time_calls
from hpctrain.world import World

MAX_RATIO = 1.10
MEASURED_SIZES = "4B,48B,1KiB,3KiB,8KiB,12KiB,32KiB,48KiB,128KiB,384KiB,1MiB,3MiB,8MiB,24MiB,64MiB"
SCREENING_ROUNDS = 3


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    world = start_world(arguments.ranks)
    tuned_sizes = parse_sizes(DEFAULT_SIZES)
    *_, rows = sweep.sweep(world.main, tuned_sizes, DEFAULT_ROUNDS, DEFAULT_LIMIT_S)
    plan = choose.make_plan(rows, (), measured=True)
    group = replace(world.main, choices=choose.make_choices(plan))
    arrays = sweep.make_operands(group, max(tuned_sizes))
    results = [
        measure_size(world, group, nbytes, in_memory, x[: nbytes // 4], arguments.rounds)
        for nbytes in parse_sizes(MEASURED_SIZES)
        for in_memory, x in arrays.arrays_by_kind
    ]
    worst = max(results, key=lambda row: row["auto_to_best"])
    claims = {
        f"auto takes at most {worst['auto_to_best']:.3f} of the best fixed algorithm "
        f"({worst['best']}, {size_text(worst['bytes'])}), <= {MAX_RATIO}": worst["auto_to_best"]
        <= MAX_RATIO
    }
    thresholds_text = {"kept": plan.in_node_memory, "plain": plan.default}
    report_result(
        world, f"auto-{world.size}-ranks", results, claims, steps=json.dumps(thresholds_text)
    )


def measure_size(
    world: World, group: Group, nbytes: int, in_memory: bool, x: np.ndarray, rounds: int
) -> dict:
    """Return the row of one size: `auto` beside the best of the others."""
    names = ["auto", *sweep.applicable_algorithms(group)]
    functions = {
        name: select.resolve_auto(select.find_allreduce(name), group, x, np.add) for name in names
    }
    calls = {name: select.bind(group, x, np.add, function) for name, function in functions.items()}
    calls_per_timing = calls_per_round(nbytes)
    screening_seconds = time_interleaved(
        world.link, calls, SCREENING_ROUNDS, calls=calls_per_timing
    )
    slow_names = sweep.find_slower(screening_seconds, sweep.DROP_RATIO) - {"auto"}
    rivals = {name: call for name, call in calls.items() if name not in slow_names}
    seconds = measure_shuffled(world, rivals, rounds, calls_per_timing)
    medians = {name: float(np.median(times)) for name, times in seconds.items()}
    best = min((name for name in medians if name != "auto"), key=medians.__getitem__)
    return {
        "bytes": nbytes,
        "in_memory": in_memory,
        "ranks": world.size,
        "rounds": rounds,
        "takes": select.algorithm_name(select.auto, group, x),
        "best": best,
        "auto_to_best": median_ratio(seconds["auto"], seconds[best]),
        "auto": summarize_times(seconds["auto"]),
        "fixed_s": {name: median_s for name, median_s in medians.items() if name != "auto"},
    }


def measure_shuffled(
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
            seconds[name].append(time_calls(world.link, rivals[name], calls))
    return seconds


if __name__ == "__main__":
    main()
