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
from lib.common import (
    make_parser,
    median_ratio,
    report_result,
    start_world,
    summarize_times,
    time_interleaved,
)

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
    arguments = make_parser(__doc__).parse_args()
    world = start_world(arguments.ranks)
    rows = [row for batch in BATCHES for row in against_single(world, batch, arguments.rounds)]
    ratios = {batch: overhead_ratio(batch, rows) for batch in BATCHES}
    rows += over_buckets(world, arguments.rounds)
    slope = slope_us(rows)
    for row in rows:
        row.pop("seconds")
    claims = {
        f"a step of batch 128 takes {ratios[128]:.3f} of `single`, <= 1.03": ratios[128] <= 1.03,
        f"a bucket takes {slope:.1f} us, <= 25": slope <= 25,
    }
    facts = {"ratio_null_to_single_at_batch": ratios, "us_per_bucket": slope}
    report_result(world, "overhead", rows, claims, **facts)


def against_single(world: World, batch_per_rank: int, rounds: int) -> list[dict]:
    """Return the rows of `single` and of `allreduce` with `null`."""
    # A rate at which nothing moves: a step whose loss is not finite would skip its update.
    widths, optimizer = [784, 1024, 1024, 10], optim.sgd(1e-6, 0.9)
    batch = make_batch(batch_per_rank, 784, 10)
    engines = {
        "single": SingleEngine(make_replica(widths), optimizer),
        "null": AllReduceEngine(
            world, make_replica(widths), optimizer, AllReduce(algorithm="null")
        ),
    }
    steps = {name: make_step(engine, batch) for name, engine in engines.items()}
    return make_rows(f"mlp batch {batch_per_rank}", time_interleaved(world.link, steps, rounds))


def over_buckets(world: World, rounds: int) -> list[dict]:
    """Return a row per number of buckets, on 64 equal layers."""
    widths = [WIDTH] * (LAYERS + 1)
    layer_bytes = 4 * (WIDTH * WIDTH + WIDTH)
    steps = {}
    for count in BUCKETS:
        size = layer_bytes * LAYERS // count
        engine_options = AllReduce(algorithm="null", bucket_bytes=size)
        engine = AllReduceEngine(world, make_replica(widths), optim.sgd(1e-6), engine_options)
        assert len(engine._reducer.sums) == count
        steps[str(count)] = make_step(engine, make_batch(32, WIDTH, WIDTH))
    return make_rows("buckets", time_interleaved(world.link, steps, rounds))


def make_replica(widths: list[int]) -> ModelReplica:
    return ModelReplica(nn.MlpOptions(widths=widths).build(None, None), 0, "float32")


def make_batch(count: int, features: int, classes: int) -> Batch:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, features)).astype(np.float32)
    return Batch.of(x, rng.integers(0, classes, count))


def make_step(engine: SingleEngine | AllReduceEngine, batch: Batch) -> Callable[[], object]:
    return lambda: engine.step(Task(batch, 1 / batch.n, nn.Key(0, 0, 0)), Flags())


def make_rows(study: str, seconds: dict[str, list[float]]) -> list[dict]:
    return [
        {"study": study, "what": k, **summarize_times(times), "seconds": times}
        for k, times in seconds.items()
    ]


def overhead_ratio(batch: int, rows: list[dict]) -> float:
    seconds_by_engine = {
        row["what"]: row["seconds"] for row in rows if row["study"] == f"mlp batch {batch}"
    }
    return median_ratio(seconds_by_engine["null"], seconds_by_engine["single"])


def slope_us(rows: list[dict]) -> float:
    """Return microseconds per bucket: the least-squares slope of the medians."""
    medians_by_count = [(int(r["what"]), r["median_s"]) for r in rows if r["study"] == "buckets"]
    return float(np.polyfit(*zip(*medians_by_count, strict=True), 1)[0] * 1e6)


if __name__ == "__main__":
    main()
