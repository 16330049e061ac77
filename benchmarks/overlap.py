"""Claims: between nodes the wire hides behind compute; in a full node `auto` starts no thread.

    python benchmarks/overlap.py hosts|node [--link 1gbit] [--batches 560 700 800] [--rounds 8]

hosts   2 hosts made by `hpctrain netlab`, where the wire takes 0.8 to 1.25 times as long as
        compute: a step with priority takes at most 1.2 times the longer of both. Compute is the
        same step with `null`, which sends nothing, wire the same buckets alone, nothing computed.
        What a step cannot take less than, where rank and thread share a core: compute, the
        processor time of the thread, and the first layer's gradient on the wire, on which the
        next forward pass waits from its beginning.
node    2 ranks on the cores of one machine: a step as `auto` reduces, with a communication thread
        and after backward; and what it takes to hand a bucket to an idle thread and hear of it

All in one job, in turn, some steps each. What a step leaves under way is part of the next one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from _common import paired_ratio, spread, world_of, write

from hpctrain import nn, optim
from hpctrain import world as worlds
from hpctrain.cluster.netlab.netlab import Lab, netlab, parse_speed
from hpctrain.core import launchers
from hpctrain.engines import AllReduce, Flags, Task
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.tuning.measure import timed
from hpctrain.world import World

WIDTHS = [784, *[640] * 24, 10]  # 10 M parameters in as many layers as networks have
STEPS = 3  # of one contender between two looks at the clock
WAYS: dict[str, dict[str, Any]] = {
    "never": {"overlap": "never"},
    "always": {"overlap": "always"},
    "priority": {"priority": True},
    "auto": {},
}
Row = dict[str, Any]


def main() -> int:
    given = arguments()
    if given.study == "node":
        measure_node(world_of(2), given)
    elif launchers.launched(os.environ).size > 1:
        measure_hosts(worlds.init(), given)
    else:
        return on_hosts(given)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=["hosts", "node"])
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--batches", type=int, nargs="+", default=[560, 700, 800])
    parser.add_argument("--rounds", type=int, default=8)
    return parser.parse_args()


def on_hosts(given: argparse.Namespace) -> int:
    """Run this script on 2 hosts of a netlab; return the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # hosts share the cores of this machine
    batches = [str(batch) for batch in given.batches]
    here = [sys.executable, __file__, "hosts", "--link", given.link,
            "--batches", *batches, "--rounds", str(given.rounds)]  # fmt: skip
    return netlab(Lab(2, 1, parse_speed(given.link)), here)


def measure_hosts(world: World, given: argparse.Namespace) -> None:
    """Time steps at several batches, hence ratios of wire to compute."""
    ways = {name: WAYS[name] for name in ("never", "always", "priority")}
    engines = {name: engine_of(world, {"algorithm": "ring"} | keys) for name, keys in ways.items()}
    engines["compute"] = engine_of(world, {"algorithm": "null"})
    rows, claims = [], {}
    for batch in given.batches:
        task = task_of(world, batch)
        steps = {name: partial(engine.step, task, Flags()) for name, engine in engines.items()}
        steps["wire"] = partial(buckets_alone, engines["always"])
        seconds, busy = in_turn(world, steps, engines, given.rounds)
        longer = np.maximum(seconds["compute"], seconds["wire"])
        bare = (WIDTHS[0] + 1) * WIDTHS[1] / engines["compute"].replica.arena.grad.size
        limit = np.add(seconds["compute"], busy["wire"]) + np.multiply(bare, seconds["wire"])
        ratio = paired_ratio(seconds["wire"], seconds["compute"])
        for name, found in seconds.items():
            to_longer = paired_ratio(found, longer)
            row = {"batch": batch, "wire_to_compute": ratio, "what": name, "to_longer": to_longer}
            rows.append({**row, "busy_s": float(np.median(busy[name])), **spread(found)})
        least = {"what": "limit", "to_longer": paired_ratio(np.maximum(limit, longer), longer)}
        rows.append({"batch": batch, "wire_to_compute": ratio, **least, **spread(limit)})
        if 0.8 <= ratio <= 1.25:
            seen = paired_ratio(seconds["priority"], longer)
            claims[f"wire/compute {ratio:.2f}: a step takes {seen:.2f} <= 1.2 of the longer"] = (
                seen <= 1.2
            )
    claims["a ratio between 0.8 and 1.25 was seen"] = bool(claims)
    about = {"link": given.link, "widths": WIDTHS, "algorithm": "ring"}
    write(world, "overlap-hosts", rows, claims, **about)


def measure_node(world: World, given: argparse.Namespace) -> None:
    """Time steps where ranks fill the cores, and the hand-off."""
    rows, claims = [], {}
    for batch in (32, 128):
        task = task_of(world, batch)
        engines = {name: engine_of(world, keys) for name, keys in WAYS.items()}
        steps = {name: partial(engine.step, task, Flags()) for name, engine in engines.items()}
        seconds, _ = in_turn(world, steps, engines, given.rounds)
        best = np.minimum(seconds["never"], seconds["always"])
        for name, found in seconds.items():
            rows.append({"batch": batch, "what": name, **spread(found),
                         "to_never": paired_ratio(found, seconds["never"])})  # fmt: skip
        seen = paired_ratio(seconds["auto"], best)
        claims[f"batch {batch}: auto takes {seen:.3f} <= 1.05 of the better way"] = seen <= 1.05
    reducer = engine_of(world, {"algorithm": "null", "overlap": "always", "bucket_bytes": 1 << 30})
    hand_off = [timed(world.link, partial(buckets_alone, reducer)) * 1e6 for _ in range(300)]
    median = float(np.median(hand_off))
    rows.append({"what": "hand-off", "median_us": median, "p95_us": np.percentile(hand_off, 95)})
    claims[f"a hand-off there and back takes {median:.1f} us <= 30"] = median <= 30
    write(world, "overlap-node", rows, claims, widths=WIDTHS)


def in_turn(
    world: World,
    steps: Mapping[str, Callable[[], Any]],
    engines: Mapping[str, Any],
    rounds: int,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of each kind of step, each in the middle of several, and in how many of
    them this rank's threads were at work.
    """
    seconds, busy = ({name: [] for name in steps} for _ in range(2))
    for round_ in range(1 + rounds):
        for name, step in steps.items():
            step()
            before = time.process_time()
            found = timed(world.link, step, STEPS)
            worked = (time.process_time() - before) / STEPS
            if name in engines:
                engines[name].settle()
            if round_:
                seconds[name].append(found)
                busy[name].append(worked)
    return seconds, busy


def buckets_alone(engine: Any) -> None:
    """Reduce the gradient without computing any."""
    for slot in reversed(engine.replica.arena.slots):
        engine._reducer.mark_ready(slot.name)
    engine._reducer.wait()


def engine_of(world: World, keys: dict[str, Any]) -> Any:
    """Return an engine of its own, with a model of its own."""
    model = nn.MlpOptions(widths=WIDTHS).build((WIDTHS[0],), WIDTHS[-1])
    replica = ModelReplica(model, 0, np.dtype(np.float32))
    return AllReduce(**keys).build(world, replica, optim.sgd(rate=1e-6, momentum=0.9))


def task_of(world: World, batch: int) -> Task:
    rng = np.random.default_rng(world.rank)
    x = rng.standard_normal((batch, WIDTHS[0]), np.float32)
    samples = Batch(x, rng.integers(0, WIDTHS[-1], batch))
    return Task(samples, 1 / (batch * world.size), nn.Key(0, 0, 0))


if __name__ == "__main__":
    sys.exit(main())
