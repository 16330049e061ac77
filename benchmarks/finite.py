"""Claim: looking at every gradient costs at most 2 % of a step of some 10 ms.

    python benchmarks/finite.py [--ranks 2] [--rounds 200]

One engine takes steps in turn with its check (hpctrain/gradients/finite.py) and with one that looks
at the loss alone: same memory, same model, an MLP of 1.1 or 1.9 million parameters, and so many
samples that the step takes 10 ms. `ratio` is the median of the paired times of whole steps.
`check_us` is the time inside the check, measured by itself in the same steps, where other work on
the machine disturbs less; the claim is about that: median over steps, by the median step.

Alone the check reads each element once; so it costs more of a step that does less with each
parameter. One rank with 1.9 million parameters (some 55 samples in 10 ms) is shown beside, and
nothing is claimed for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isfinite
from time import perf_counter
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

from hpctrain import broadcast, nn, optim
from hpctrain.engines import Flags, Task
from hpctrain.engines.synchronous.allreduce import AllReduce
from hpctrain.engines.synchronous.single import SingleEngine
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.nn import Sums
from hpctrain.world import World

MODELS = {"1.1M": [784, 1024, 256, 10], "1.9M": [784, 1024, 1024, 10]}  #: widths
UNCLAIMED_CASE = ("single", "1.9M")
STEP_S = 10e-3
ENGINES = {
    "single": None,
    "allreduce": AllReduce(),
    "allreduce, overlap": AllReduce(overlap="always", bucket_bytes=1 << 20),
    "allreduce, shard_optimizer": AllReduce(shard_optimizer=True),
}
MAX_SHARE = 0.02


class LossCheck:
    """What was looked at before."""

    fault = ""

    def begin(
        self, on_ready: Callable[[str], None], check_slots: bool = True
    ) -> Callable[[str], None]:
        return on_ready

    def passes(self, sums: Sums) -> bool:
        return isfinite(sums["loss"].sum)

    def sum_passes(self, total: np.ndarray) -> bool:
        return True


class TimedCheck:
    """A check that takes the time of itself."""

    def __init__(self, check: GradientCheck):
        self._check, self.seconds = check, list[float]()

    def begin(
        self, on_ready: Callable[[str], None], check_slots: bool = True
    ) -> Callable[[str], None]:
        start_s, outside_s = perf_counter(), [0.0]

        def timed_on_ready(name: str) -> None:
            before_s = perf_counter()
            on_ready(name)
            outside_s[0] += perf_counter() - before_s

        check_slot = self._check.begin(timed_on_ready, check_slots)
        self.seconds.append(perf_counter() - start_s)

        def timed_slot(name: str) -> None:
            start_s, before_s = perf_counter(), outside_s[0]
            check_slot(name)
            self.seconds[-1] += perf_counter() - start_s - (outside_s[0] - before_s)

        return timed_slot

    def passes(self, sums: Sums) -> bool:
        start_s = perf_counter()
        is_finite = self._check.passes(sums)
        self.seconds[-1] += perf_counter() - start_s
        return is_finite

    def sum_passes(self, total: np.ndarray) -> bool:
        start_s = perf_counter()
        is_finite = self._check.sum_passes(total)
        self.seconds[-1] += perf_counter() - start_s
        return is_finite


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(rounds=200)
    arguments = parser.parse_args()
    world = start_world(arguments.ranks)
    rows = [
        measure_engine(world, name, engine, model, arguments.rounds)
        for model in MODELS
        for name, engine in ENGINES.items()
    ]
    claims = {
        f"{row['engine']}, {row['model']}: {100 * row['part']:.2f} % of a step of "
        f"{1e3 * row['median_s']:.1f} ms, <= {100 * MAX_SHARE:.0f}": row["part"] <= MAX_SHARE
        for row in rows
        if (row["engine"], row["model"]) != UNCLAIMED_CASE
    }
    report_result(world, "finite", rows, claims)


def measure_engine(
    world: World, name: str, options: Any, model: str, rounds: int
) -> dict[str, Any]:
    """Return what steps take with the check and without."""
    widths = MODELS[model]
    network = nn.MlpOptions(widths=widths).build((widths[0],), widths[-1])
    # A rate at which nothing moves: all steps are the same.
    replica, optimizer = ModelReplica(network, 0, np.float32), optim.sgd(1e-6, 0.9)
    engine = (
        options.build(world, replica, optimizer) if options else SingleEngine(replica, optimizer)
    )
    check, timed_check = engine.check, TimedCheck(engine.check)
    samples = samples_for_step(world, engine, widths)
    task = make_task(world, widths, samples)

    def make_step(check: Any) -> Callable[[], Any]:
        def step() -> Any:
            engine.check = check
            return engine.step(task, Flags())

        return step

    steps = {"checked": check, "loss alone": LossCheck(), "timed": timed_check}
    seconds = time_interleaved(
        world.link, {key: make_step(one) for key, one in steps.items()}, rounds
    )
    engine.close()
    check_s, unchecked = (
        float(np.median(timed_check.seconds)),
        summarize_times(seconds["loss alone"]),
    )
    return {
        "engine": name,
        "model": model,
        "ranks": world.size,
        "samples_per_rank": samples,
        **unchecked,
        "ratio": median_ratio(seconds["checked"], seconds["loss alone"]),
        "check_us": 1e6 * check_s,
        "part": check_s / unchecked["median_s"],
        "seconds": {key: [round(time_s, 7) for time_s in times] for key, times in seconds.items()},
    }


def samples_for_step(world: World, engine: Any, widths: list[int]) -> int:
    """Return how many samples per rank make a step of STEP_S: the time is affine in them."""
    min_samples, max_samples = 16, 64
    step = {
        n: partial(engine.step, make_task(world, widths, n), Flags())
        for n in (min_samples, max_samples)
    }
    seconds = time_interleaved(
        world.link, {"few": step[min_samples], "many": step[max_samples]}, 20
    )
    min_step_s, max_step_s = (float(np.median(seconds[name])) for name in ("few", "many"))
    samples = np.array(
        [
            min_samples
            + (STEP_S - min_step_s) * (max_samples - min_samples) / (max_step_s - min_step_s)
        ]
    )
    broadcast(samples, world=world)
    return max(min_samples, round(float(samples[0])))


def make_task(world: World, widths: list[int], samples: int) -> Task:
    rng = np.random.default_rng(world.rank)
    x = rng.standard_normal((samples, widths[0]), np.float32)
    batch = Batch.of(x, rng.integers(0, widths[-1], samples))
    return Task(batch, 1 / (samples * world.size), nn.Key(0, 0, 0))


if __name__ == "__main__":
    main()
