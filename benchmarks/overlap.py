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
from lib.common import median_ratio, report_result, start_world, summarize_times

from hpctrain import nn, optim
from hpctrain import world as worlds
from hpctrain.cluster.netlab.netlab import Lab, netlab, parse_speed
from hpctrain.core import launchers
from hpctrain.engines import AllReduce, Flags, Task
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.tuning.measure import time_calls
from hpctrain.world import World

WIDTHS = [784, *[640] * 24, 10]  # 10 M parameters in as many layers as networks have
STEPS = 3  # of one contender between two looks at the clock
OVERLAP_MODES: dict[str, dict[str, Any]] = {
    "never": {"overlap": "never"},
    "always": {"overlap": "always"},
    "priority": {"priority": True},
    "auto": {},
}
Row = dict[str, Any]


def main() -> int:
    options = parse_arguments()
    if options.study == "node":
        measure_node(start_world(2), options)
    elif launchers.launched(os.environ).size > 1:
        measure_hosts(worlds.init(), options)
    else:
        return start_on_hosts(options)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=["hosts", "node"])
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--batches", type=int, nargs="+", default=[560, 700, 800])
    parser.add_argument("--rounds", type=int, default=8)
    return parser.parse_args()


def start_on_hosts(options: argparse.Namespace) -> int:
    """Run this script on 2 hosts of a netlab; return the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # hosts share the cores of this machine
    batches = [str(batch) for batch in options.batches]
    command = [sys.executable, __file__, "hosts", "--link", options.link,
            "--batches", *batches, "--rounds", str(options.rounds)]  # fmt: skip
    return netlab(Lab(2, 1, parse_speed(options.link)), command)


def measure_hosts(world: World, options: argparse.Namespace) -> None:
    """Time steps at several batches, hence ratios of wire to compute."""
    modes = {name: OVERLAP_MODES[name] for name in ("never", "always", "priority")}
    engines = {
        name: make_engine(world, {"algorithm": "ring"} | engine_options)
        for name, engine_options in modes.items()
    }
    engines["compute"] = make_engine(world, {"algorithm": "null"})
    rows, claims = [], {}
    for batch in options.batches:
        task = make_task(world, batch)
        steps = {name: partial(engine.step, task, Flags()) for name, engine in engines.items()}
        steps["wire"] = partial(reduce_only, engines["always"])
        seconds, busy_s = interleave_steps(world, steps, engines, options.rounds)
        longer_s = np.maximum(seconds["compute"], seconds["wire"])
        first_layer_share = (WIDTHS[0] + 1) * WIDTHS[1] / engines["compute"].replica.arena.grad.size
        limit_s = np.add(seconds["compute"], busy_s["wire"]) + np.multiply(
            first_layer_share, seconds["wire"]
        )
        ratio = median_ratio(seconds["wire"], seconds["compute"])
        for name, times in seconds.items():
            to_longer = median_ratio(times, longer_s)
            row = {"batch": batch, "wire_to_compute": ratio, "what": name, "to_longer": to_longer}
            rows.append({**row, "busy_s": float(np.median(busy_s[name])), **summarize_times(times)})
        limit_columns = {
            "what": "limit",
            "to_longer": median_ratio(np.maximum(limit_s, longer_s), longer_s),
        }
        rows.append(
            {"batch": batch, "wire_to_compute": ratio, **limit_columns, **summarize_times(limit_s)}
        )
        if 0.8 <= ratio <= 1.25:
            ratio_to_longer = median_ratio(seconds["priority"], longer_s)
            claims[
                f"wire/compute {ratio:.2f}: a step takes {ratio_to_longer:.2f} <= 1.2 of the longer"
            ] = ratio_to_longer <= 1.2
    claims["a ratio between 0.8 and 1.25 was seen"] = bool(claims)
    about = {"link": options.link, "widths": WIDTHS, "algorithm": "ring"}
    report_result(world, "overlap-hosts", rows, claims, **about)


def measure_node(world: World, options: argparse.Namespace) -> None:
    """Time steps where ranks fill the cores, and the hand-off."""
    rows, claims = [], {}
    for batch in (32, 128):
        task = make_task(world, batch)
        engines = {
            name: make_engine(world, engine_options)
            for name, engine_options in OVERLAP_MODES.items()
        }
        steps = {name: partial(engine.step, task, Flags()) for name, engine in engines.items()}
        seconds, _ = interleave_steps(world, steps, engines, options.rounds)
        better_s = np.minimum(seconds["never"], seconds["always"])
        for name, times in seconds.items():
            rows.append({"batch": batch, "what": name, **summarize_times(times),
                         "to_never": median_ratio(times, seconds["never"])})  # fmt: skip
        ratio_to_longer = median_ratio(seconds["auto"], better_s)
        claims[f"batch {batch}: auto takes {ratio_to_longer:.3f} <= 1.05 of the better way"] = (
            ratio_to_longer <= 1.05
        )
    reducer = make_engine(
        world, {"algorithm": "null", "overlap": "always", "bucket_bytes": 1 << 30}
    )
    hand_off = [time_calls(world.link, partial(reduce_only, reducer)) * 1e6 for _ in range(300)]
    median = float(np.median(hand_off))
    rows.append({"what": "hand-off", "median_us": median, "p95_us": np.percentile(hand_off, 95)})
    claims[f"a hand-off there and back takes {median:.1f} us <= 30"] = median <= 30
    report_result(world, "overlap-node", rows, claims, widths=WIDTHS)


def interleave_steps(
    world: World,
    steps: Mapping[str, Callable[[], Any]],
    engines: Mapping[str, Any],
    rounds: int,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of each kind of step, each in the middle of several, and in how many of
    them this rank's threads were at work.
    """
    seconds, busy_s = ({name: [] for name in steps} for _ in range(2))
    for round_number in range(1 + rounds):
        for name, step in steps.items():
            step()
            cpu_start_s = time.process_time()
            times = time_calls(world.link, step, STEPS)
            cpu_s = (time.process_time() - cpu_start_s) / STEPS
            if name in engines:
                engines[name].settle()
            if round_number:
                seconds[name].append(times)
                busy_s[name].append(cpu_s)
    return seconds, busy_s


def reduce_only(engine: Any) -> None:
    """Reduce the gradient without computing any."""
    for slot in reversed(engine.replica.arena.slots):
        engine._reducer.mark_ready(slot.name)
    engine._reducer.wait()


def make_engine(world: World, engine_options: dict[str, Any]) -> Any:
    """Return an engine of its own, with a model of its own."""
    model = nn.MlpOptions(widths=WIDTHS).build((WIDTHS[0],), WIDTHS[-1])
    replica = ModelReplica(model, 0, np.dtype(np.float32))
    return AllReduce(**engine_options).build(world, replica, optim.sgd(rate=1e-6, momentum=0.9))


def make_task(world: World, batch: int) -> Task:
    rng = np.random.default_rng(world.rank)
    x = rng.standard_normal((batch, WIDTHS[0]), np.float32)
    samples = Batch.of(x, rng.integers(0, WIDTHS[-1], batch))
    return Task(samples, 1 / (batch * world.size), nn.Key(0, 0, 0))


if __name__ == "__main__":
    sys.exit(main())
