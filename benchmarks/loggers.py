"""Claim: a tracker, even one that blocks for ever, adds at most 1 % to a step of 10 ms with a row.

    python benchmarks/loggers.py [--ranks 2] [--rounds 6] [--steps 200]

The compute of a step is a sleep of 10 ms on every rank. Trainings take turns: without a logger,
with one whose tracker never returns, with a CSV file, and with those of TensorBoard, W&B (offline)
and MLflow whose packages are there. The cost is the processor time of the
training's thread on rank 0 in the call that hands a row to the logger, the mean over the steps of
a training, the median over rounds. Beside it stands the step, the median time from row to row,
which on a busy machine scatters by more.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from lib.common import make_parser, report_result, start_world

import hpctrain as ht
from hpctrain.core.run_files import run_folder
from hpctrain.training.faults import FaultsOptions
from hpctrain.training.loggers import run_loggers
from hpctrain.training.loggers.loggers import CSV, Logger, MLflow, TensorBoard, WandB
from hpctrain.training.loggers.tracker import Target, Tracker
from hpctrain.world import World

STEP_S = 0.01
MAX_SHARE = 0.01


class Blocked(CSV):
    """A logger whose tracker never returns."""

    def make_tracker(self, target: Target) -> Tracker:
        tracker = super().make_tracker(target)
        tracker.begin = lambda step, has_rows: threading.Event().wait()
        return tracker


def find_contenders() -> dict[str, Callable[[], list[Logger]]]:
    """Return functions that make the loggers of a training, by name."""
    contenders: dict[str, Callable[[], list[Logger]]] = {
        "none": list, "blocked": lambda: [Blocked()]
    }  # fmt: skip
    for make in (CSV, TensorBoard, WandB, MLflow):
        if all(map(find_spec, make.packages)):
            contenders[make.kind] = lambda make=make: [make()]
    return contenders


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(rounds=6)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    world = start_world(arguments.ranks)
    contenders = find_contenders()
    logging.getLogger("hpctrain").setLevel(logging.ERROR)
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(arguments.rounds):
        for name, make in contenders.items():
            run_loggers.END_S = 0.1 if name == "blocked" else 60.0  # after the last step
            measured[name].append(measure(world, make(), arguments.steps))
    rows = [
        {
            "logger": name,
            "ranks": world.size,
            "cost_s": float(np.median([cost_s for cost_s, _ in pairs])),
            "step_s": float(np.median([step_s for _, step_s in pairs])),
            "cost_s_of_rounds": [cost_s for cost_s, _ in pairs],
            "step_s_of_rounds": [step_s for _, step_s in pairs],
        }
        for name, pairs in measured.items()
    ]
    claims = {}
    for row in rows[1:]:
        text = "that blocks for ever" if row["logger"] == "blocked" else row["logger"]
        share = row["cost_s"] / STEP_S
        claim = f"a tracker {text} adds {1e6 * row['cost_s']:.0f} us to a step of 10 ms, "
        claims[f"{claim}{share:.2%}, <= 1 %"] = share <= MAX_SHARE
    load = world.from_first(lambda: os.getloadavg()[0])
    report_result(world, f"loggers-{world.size}-ranks", rows, claims, load=load)


def measure(world: World, loggers: Sequence[Logger], steps: int) -> tuple[float, float]:
    """Return the cost of a row and the median time from row to row, in s; collective."""
    cost_s = 0.0
    add = run_loggers.RunLoggers.add

    def timed_add(self: Any, row: Any) -> None:
        nonlocal cost_s
        began = time.thread_time()
        add(self, row)
        cost_s += time.thread_time() - began

    run_loggers.RunLoggers.add = timed_add
    try:
        step_s = train(world, loggers, steps)
    finally:
        run_loggers.RunLoggers.add = add
    return world.from_first(lambda: cost_s / steps), step_s


def train(world: World, loggers: Sequence[Logger], steps: int) -> float:
    """Train, and return the median time from row to row, in s; collective."""
    x = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(world.from_first(lambda: folder), "run")
        with ht.Trainer(
            ht.nn.Model([ht.nn.Linear(3)], 8),
            "sgd",
            world=world,
            callbacks=loggers,
            faults=FaultsOptions(step_ms=1000.0 * STEP_S),
        ) as trainer:
            trainer.fit(
                (x, x[:, :3].argmax(1)),
                steps=steps,
                batch=32,
                out=run,
                options=ht.FitOptions(interval_steps=1),
                checkpoints=ht.CheckpointOptions(keep=1),
            )
        walls = world.from_first(lambda: [row["wall_s"] for row in run_folder.rows(run)])
        ht.barrier()
    return float(np.median(np.diff(walls)))


if __name__ == "__main__":
    main()
