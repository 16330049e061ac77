"""Claims: the machinery around an all-reduce costs a step at most 3 %, a bucket at most 25 us.

    python benchmarks/overhead.py [--ranks 2] [--rounds 200]

1. `single` and `allreduce` with `null` (which sends nothing) take steps in turn in the same
   processes, on equal models (MLP 784-1024-1024-10); the median of the paired ratios is the
   overhead of reducer, vote and communication thread. It is some 100 us, whatever the step: the
   longer the step, the less it weighs.
2. The same step with the gradient cut into 1, 4, 16 and 64 buckets; the slope of the medians.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from _common import interleaved, options, paired_ratio, spread, world_of, write

from hpctrain import nn, optim
from hpctrain.engines import Flags, Task
from hpctrain.engines.synchronous.allreduce import AllReduce, AllReduceEngine
from hpctrain.engines.synchronous.single import SingleEngine
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.world import World

BUCKETS = (1, 4, 16, 64)
BATCHES = (32, 128)
LAYERS, WIDTH = 64, 64


def main() -> None:
    arguments = options(__doc__).parse_args()
    world = world_of(arguments.ranks)
    rows = [row for batch in BATCHES for row in against_single(world, batch, arguments.rounds)]
    ratios = {batch: ratio_at(batch, rows) for batch in BATCHES}
    rows += over_buckets(world, arguments.rounds)
    slope = slope_of(rows)
    for row in rows:
        row.pop("seconds")
    claims = {
        f"a step of batch 128 takes {ratios[128]:.3f} of `single`, <= 1.03": ratios[128] <= 1.03,
        f"a bucket takes {slope:.1f} us, <= 25": slope <= 25,
    }
    facts = {"ratio_null_to_single_at_batch": ratios, "us_per_bucket": slope}
    write(world, "overhead", rows, claims, **facts)


def against_single(world: World, batch_per_rank: int, rounds: int) -> list[dict]:
    """Return the rows of `single` and of `allreduce` with `null`."""
    # A rate at which nothing moves: a step whose loss is not finite would skip its update.
    widths, optimizer = [784, 1024, 1024, 10], optim.sgd(1e-6, 0.9)
    batch = samples(batch_per_rank, 784, 10)
    engines = {
        "single": SingleEngine(replica_of(widths), optimizer),
        "null": AllReduceEngine(world, replica_of(widths), optimizer, AllReduce(algorithm="null")),
    }
    steps = {name: step_of(engine, batch) for name, engine in engines.items()}
    return rows_of(f"mlp batch {batch_per_rank}", interleaved(world.link, steps, rounds))


def over_buckets(world: World, rounds: int) -> list[dict]:
    """Return a row per number of buckets, on 64 equal layers."""
    widths = [WIDTH] * (LAYERS + 1)
    layer_bytes = 4 * (WIDTH * WIDTH + WIDTH)
    steps = {}
    for count in BUCKETS:
        size = layer_bytes * LAYERS // count
        options_ = AllReduce(algorithm="null", bucket_bytes=size)
        engine = AllReduceEngine(world, replica_of(widths), optim.sgd(1e-6), options_)
        assert len(engine._reducer._slices) == count
        steps[str(count)] = step_of(engine, samples(32, WIDTH, WIDTH))
    return rows_of("buckets", interleaved(world.link, steps, rounds))


def replica_of(widths: list[int]) -> ModelReplica:
    return ModelReplica(nn.MlpOptions(widths=widths).build(None, None), 0, "float32")


def samples(count: int, features: int, classes: int) -> Batch:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((count, features)).astype(np.float32)
    return Batch(x, draw.integers(0, classes, count))


def step_of(engine: SingleEngine | AllReduceEngine, batch: Batch) -> Callable[[], object]:
    return lambda: engine.step(Task(batch, 1 / len(batch.y), nn.Key(0, 0, 0)), Flags())


def rows_of(study: str, seconds: dict[str, list[float]]) -> list[dict]:
    return [{"study": study, "what": k, **spread(v), "seconds": v} for k, v in seconds.items()]


def ratio_at(batch: int, rows: list[dict]) -> float:
    by = {row["what"]: row["seconds"] for row in rows if row["study"] == f"mlp batch {batch}"}
    return paired_ratio(by["null"], by["single"])


def slope_of(rows: list[dict]) -> float:
    """Return microseconds per bucket: the least-squares slope of the medians."""
    found = [(int(r["what"]), r["median_s"]) for r in rows if r["study"] == "buckets"]
    return float(np.polyfit(*zip(*found, strict=True), 1)[0] * 1e6)


if __name__ == "__main__":
    main()
