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
from _common import interleaved, options, paired_ratio, spread, world_of, write

from hpctrain import broadcast, nn, optim
from hpctrain.engines import Flags, Task
from hpctrain.engines.synchronous.allreduce import AllReduce
from hpctrain.engines.synchronous.single import SingleEngine
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.nn import Sums
from hpctrain.world import World

MODELS = {"1.1M": [784, 1024, 256, 10], "1.9M": [784, 1024, 1024, 10]}  #: widths
UNCLAIMED = ("single", "1.9M")
STEP_S = 10e-3
ENGINES = {
    "single": None,
    "allreduce": AllReduce(),
    "allreduce, overlap": AllReduce(overlap="always", bucket_bytes=1 << 20),
    "allreduce, shard_optimizer": AllReduce(shard_optimizer=True),
}
MOST = 0.02


class LossAlone:
    """What was looked at before."""

    fault = ""

    def begin(self, on_ready: Callable[[str], None], slots: bool = True) -> Callable[[str], None]:
        return on_ready

    def passes(self, sums: Sums) -> bool:
        return isfinite(sums.loss)

    def sum_passes(self, total: np.ndarray) -> bool:
        return True


class Timed:
    """A check that takes the time of itself."""

    def __init__(self, check: GradientCheck):
        self._check, self.seconds = check, list[float]()

    def begin(self, on_ready: Callable[[str], None], slots: bool = True) -> Callable[[str], None]:
        start, outside = perf_counter(), [0.0]

        def told(name: str) -> None:
            before = perf_counter()
            on_ready(name)
            outside[0] += perf_counter() - before

        ready = self._check.begin(told, slots)
        self.seconds.append(perf_counter() - start)

        def timed(name: str) -> None:
            start, before = perf_counter(), outside[0]
            ready(name)
            self.seconds[-1] += perf_counter() - start - (outside[0] - before)

        return timed

    def passes(self, sums: Sums) -> bool:
        start = perf_counter()
        fine = self._check.passes(sums)
        self.seconds[-1] += perf_counter() - start
        return fine

    def sum_passes(self, total: np.ndarray) -> bool:
        start = perf_counter()
        fine = self._check.sum_passes(total)
        self.seconds[-1] += perf_counter() - start
        return fine


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(rounds=200)
    arguments = parser.parse_args()
    world = world_of(arguments.ranks)
    rows = [
        row_of(world, name, engine, model, arguments.rounds)
        for model in MODELS
        for name, engine in ENGINES.items()
    ]
    claims = {
        f"{row['engine']}, {row['model']}: {100 * row['part']:.2f} % of a step of "
        f"{1e3 * row['median_s']:.1f} ms, <= {100 * MOST:.0f}": row["part"] <= MOST
        for row in rows
        if (row["engine"], row["model"]) != UNCLAIMED
    }
    write(world, "finite", rows, claims)


def row_of(world: World, name: str, options: Any, model: str, rounds: int) -> dict[str, Any]:
    """Return what steps take with the check and without."""
    widths = MODELS[model]
    built = nn.MlpOptions(widths=widths).build((widths[0],), widths[-1])
    # A rate at which nothing moves: all steps are the same.
    replica, optimizer = ModelReplica(built, 0, np.float32), optim.sgd(1e-6, 0.9)
    engine = (
        options.build(world, replica, optimizer) if options else SingleEngine(replica, optimizer)
    )
    check, timed = engine.check, Timed(engine.check)
    samples = samples_of(world, engine, widths)
    task = task_of(world, widths, samples)

    def step_with(one: Any) -> Callable[[], Any]:
        def step() -> Any:
            engine.check = one
            return engine.step(task, Flags())

        return step

    steps = {"checked": check, "loss alone": LossAlone(), "timed": timed}
    seconds = interleaved(world.link, {key: step_with(one) for key, one in steps.items()}, rounds)
    engine.close()
    inside, plain = float(np.median(timed.seconds)), spread(seconds["loss alone"])
    return {
        "engine": name,
        "model": model,
        "ranks": world.size,
        "samples_per_rank": samples,
        **plain,
        "ratio": paired_ratio(seconds["checked"], seconds["loss alone"]),
        "check_us": 1e6 * inside,
        "part": inside / plain["median_s"],
        "seconds": {key: [round(s, 7) for s in found] for key, found in seconds.items()},
    }


def samples_of(world: World, engine: Any, widths: list[int]) -> int:
    """Return how many samples per rank make a step of STEP_S: the time is affine in them."""
    few, many = 16, 64
    step = {n: partial(engine.step, task_of(world, widths, n), Flags()) for n in (few, many)}
    seconds = interleaved(world.link, {"few": step[few], "many": step[many]}, 20)
    low, high = (float(np.median(seconds[name])) for name in ("few", "many"))
    samples = np.array([few + (STEP_S - low) * (many - few) / (high - low)])
    broadcast(samples, world=world)
    return max(few, round(float(samples[0])))


def task_of(world: World, widths: list[int], samples: int) -> Task:
    rng = np.random.default_rng(world.rank)
    x = rng.standard_normal((samples, widths[0]), np.float32)
    batch = Batch(x, rng.integers(0, widths[-1], samples))
    return Task(batch, 1 / (samples * world.size), nn.Key(0, 0, 0))


if __name__ == "__main__":
    main()
