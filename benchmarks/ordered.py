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
from _common import interleaved, options, paired_ratio, spread, write

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
WAYS: dict[str, dict[str, Any]] = {
    "fast": {},
    "pieces": {},
    "ordered-4": {"reduction": "ordered", "blocks": 4},
    "ordered-8": {"reduction": "ordered", "blocks": BLOCKS},
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--part", type=Path, help="where the ranks of one size leave what they saw")
    arguments = parser.parse_args()
    if arguments.part is None:
        join(arguments.models, arguments.rounds)
        return
    world = init()
    rows = [row for m in arguments.models for row in rows_of(world, m, arguments.rounds)]
    if world.rank == 0:
        arguments.part.write_text(json.dumps(rows))


def join(models: list[str], rounds: int) -> None:
    """Start the ranks of each size, one size after the other, and keep what they saw."""
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder, "part")
        given = ["--models", *models, "--rounds", str(rounds), "--part", str(part)]
        for ranks in RANKS:
            if code := launch_program(ranks, [sys.executable, __file__, *given]):
                sys.exit(code)
            rows += json.loads(part.read_text())
    claims = {}
    for row in rows:
        if "blocks" in row:
            alike = [r["params_sha256"] for r in rows if (r["model"], r["way"]) == name_of(row)]
            told = f"{row['model']}, {row['way']}: the same bytes on {len(alike)} numbers of ranks"
            claims[told] = len(alike) == len(RANKS) and len(set(alike)) == 1
    write(init(), "ordered", rows, claims, batch=BATCH)


def name_of(row: dict[str, Any]) -> tuple[str, str]:
    return row["model"], row["way"]


def rows_of(world: World, model: str, rounds: int) -> list[dict[str, Any]]:
    """Return a row per way of summing, on this number of ranks."""
    built = {way: engine_of(world, model, way) for way in WAYS}
    steps = {way: step_of(engine, world, model) for way, engine in built.items()}
    seconds = interleaved(world.link, steps, rounds)
    return [
        {
            "model": model,
            "ranks": world.size,
            "way": way,
            **WAYS[way],
            **spread(taken),
            "times_fast": paired_ratio(taken, seconds["fast"]),
            "params_sha256": params_sha256(built[way].replica.arena),
        }
        for way, taken in seconds.items()
    ]


def engine_of(world: World, model: str, way: str) -> Engine:
    replica = ModelReplica(nn.MlpOptions(widths=MODELS[model]).build(None, None), 0, "float32")
    if way == "pieces":
        replica.micro_batches = BLOCKS // world.size
    return engines.AllReduce(**WAYS[way]).build(world, replica, optim.sgd(0.01, 0.9))


def step_of(engine: Engine, world: World, model: str) -> Callable[[], object]:
    """Return a training step on this rank's share of one batch, the same each time."""
    draw, widths = np.random.default_rng(0), MODELS[model]
    x = draw.standard_normal((BATCH, widths[0])).astype(np.float32)
    y = draw.integers(0, widths[-1], BATCH)
    first, own = share(np.arange(BATCH), world.rank, world.size)
    task = Task(Batch(x[own], y[own]), 1 / BATCH, nn.Key(0, 0, first, samples=BATCH))
    return lambda: engine.step(task, Flags())  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
