"""Claim: `reduction = "ordered"` trains to the same bytes on 1, 2 and 4 ranks; shown: its cost.

    python benchmarks/ordered.py [--rounds 30] [--models digits mlp-10m]

Whole training steps of one global batch, one BLAS thread per rank, taken in turn in one run on each
number of ranks: `fast`, and `ordered` with 4 and with 8 blocks. Between them stands `pieces`: fast,
with each rank's share computed in as many micro-batches as it has blocks of 8. What `ordered` costs
beyond `pieces` is the tree; what `pieces` costs beyond `fast` is that matrices are smaller.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from lib.common import make_parser, median_ratio, report_result, summarize_times, time_interleaved

from hpctrain import engines, nn, optim
from hpctrain.cluster.launch import launch_program
from hpctrain.data import share
from hpctrain.engines import Engine, Flags, Task
from hpctrain.gradients.arena import params_sha256
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.world import World, init

RANKS = (1, 2, 4)
BLOCKS = 8
BATCH = 128
MODELS = {"digits": [64, 256, 256, 10], "mlp-10m": [784, 2560, 2560, 512, 10]}
REDUCTIONS: dict[str, dict[str, Any]] = {
    "fast": {},
    "pieces": {},
    "ordered-4": {"reduction": "ordered", "blocks": 4},
    "ordered-8": {"reduction": "ordered", "blocks": BLOCKS},
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--part", type=Path, help="where the ranks of one size leave what they saw")
    arguments = parser.parse_args()
    if arguments.part is None:
        run_all_sizes(arguments.models, arguments.rounds)
        return
    world = init()
    rows = [row for m in arguments.models for row in measure_model(world, m, arguments.rounds)]
    if world.rank == 0:
        arguments.part.write_text(json.dumps(rows))


def run_all_sizes(models: list[str], rounds: int) -> None:
    """Start the ranks of each size, one size after the other, and keep what they saw."""
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder, "part")
        command_options = ["--models", *models, "--rounds", str(rounds), "--part", str(part)]
        for ranks in RANKS:
            if code := launch_program(ranks, [sys.executable, __file__, *command_options]):
                sys.exit(code)
            rows += json.loads(part.read_text())
    claims = {}
    for row in rows:
        if "blocks" in row:
            hashes = [
                r["params_sha256"] for r in rows if (r["model"], r["way"]) == model_and_way(row)
            ]
            claim = (
                f"{row['model']}, {row['way']}: the same bytes on {len(hashes)} numbers of ranks"
            )
            claims[claim] = len(hashes) == len(RANKS) and len(set(hashes)) == 1
    report_result(init(), "ordered", rows, claims, batch=BATCH)


def model_and_way(row: dict[str, Any]) -> tuple[str, str]:
    return row["model"], row["way"]


def measure_model(world: World, model: str, rounds: int) -> list[dict[str, Any]]:
    """Return a row per way of summing, on this number of ranks."""
    engines_by_way = {way: make_engine(world, model, way) for way in REDUCTIONS}
    steps = {way: make_step(engine, world, model) for way, engine in engines_by_way.items()}
    seconds = time_interleaved(world.link, steps, rounds)
    return [
        {
            "model": model,
            "ranks": world.size,
            "way": way,
            **REDUCTIONS[way],
            **summarize_times(times),
            "times_fast": median_ratio(times, seconds["fast"]),
            "params_sha256": params_sha256(engines_by_way[way].replica.arena),
        }
        for way, times in seconds.items()
    ]


def make_engine(world: World, model: str, way: str) -> Engine:
    replica = ModelReplica(nn.MlpOptions(widths=MODELS[model]).build(None, None), 0, "float32")
    if way == "pieces":
        replica.micro_batches = BLOCKS // world.size
    return engines.AllReduce(**REDUCTIONS[way]).build(world, replica, optim.sgd(0.01, 0.9))


def make_step(engine: Engine, world: World, model: str) -> Callable[[], object]:
    """Return a training step on this rank's share of one batch, the same each time."""
    rng, widths = np.random.default_rng(0), MODELS[model]
    x = rng.standard_normal((BATCH, widths[0])).astype(np.float32)
    y = rng.integers(0, widths[-1], BATCH)
    first_index, own_indexes = share(np.arange(BATCH), world.rank, world.size)
    task = Task(
        Batch.of(x[own_indexes], y[own_indexes]),
        1 / BATCH,
        nn.Key(0, 0, first_index, samples=BATCH),
    )
    return lambda: engine.step(task, Flags())  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
