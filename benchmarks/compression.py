"""Claims: on links of 1 Gbit/s compression makes steps faster, and mnist is learned as well.

    python benchmarks/compression.py [steps] [accuracy] [--hosts 2 4] [--link 1gbit] [--rounds 12]

steps     a wide MLP whose gradient fills the wire, on hosts made by `hpctrain netlab`: the same
          step with each method, all in one job, in turn; `null` sends nothing, so it is compute
accuracy  the recipe `mnist`, all of its 4,000 training and 1,000 test images and its 12 epochs, but
          a ResNet-8 of half the channels in place of ResNet-20; 4 ranks, which are threads of one
          process: what is computed does not depend on what carries the messages

Draw the results with benchmarks/plots/compression.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import threadpoolctl
from lib.common import median_ratio, report_result, summarize_times, time_interleaved

from hpctrain import nn, optim
from hpctrain import world as worlds
from hpctrain.cluster.netlab.netlab import Lab, netlab, parse_speed
from hpctrain.core import launchers
from hpctrain.engines import AllReduce, Flags, Task
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.training import recipe, runs
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import World

METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"compression": "bf16"},
    "fp16": {"compression": "fp16"},
    "top-k 1 %": {"compression": "top-k", "compression_ratio": 0.01},
    "powersgd rank 4": {"compression": "powersgd", "compression_rank": 4},
}
WIDTHS, BATCH_PER_RANK = [784, 2048, 2048, 10], 16
RING_OPTIONS = {"algorithm": "ring"}
#: Times as fast as plain, least, by hosts. Four share two cores, and these two methods compute.
MIN_SPEED_UP = {"bf16": (1.5, 1.5), "fp16": (1.3, 1.2), "top-k 1 %": (3.0, 1.7),
          "powersgd rank 4": (4.0, 2.0)}  # fmt: skip
RANKS, MAX_ACCURACY_LOSS = 4, 0.015
SMALL_MODEL = ["model.blocks=1", "model.channels=[8,16,32]"]
SUMMARY_KEYS = ("test_accuracy", "test_loss", "train_loss", "bytes_sent_per_rank", "params_sha256")
Row = dict[str, Any]


def main() -> int:
    options = parse_arguments()
    if launchers.launched(os.environ).size > 1:  # on a host of the netlab
        measure_steps(worlds.init(), options.link, options.rounds)
        return 0
    studies: dict[str, Callable[[], int]] = {
        "steps": lambda: max(start_on_hosts(hosts, options) for hosts in options.hosts),
        "accuracy": lambda: measure_accuracy(options.epochs, options.seeds),
    }
    return max(studies[name]() for name in options.studies or studies)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("studies", nargs="*", metavar="steps|accuracy", help="both, if none")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    return parser.parse_args()


def start_on_hosts(hosts: int, options: argparse.Namespace) -> int:
    """Run this script on each host of a netlab; return the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # hosts share the cores of this machine
    command = [sys.executable, __file__, "--link", options.link, "--rounds", str(options.rounds)]
    return netlab(Lab(hosts, 1, parse_speed(options.link)), command)


def measure_steps(world: World, link: str, rounds: int) -> None:
    """Time a step of each method, in turn."""
    engines = {
        name: make_engine(world, engine_options | ring_options(name))
        for name, engine_options in METHODS.items()
    }
    engines["null"] = make_engine(world, {"algorithm": "null"})
    task, bytes_sent = make_task(world), dict.fromkeys(engines, 0)

    def step(name: str) -> None:
        bytes_before = engines[name].bytes_sent
        engines[name].step(task, Flags())
        bytes_sent[name] = engines[name].bytes_sent - bytes_before

    seconds = time_interleaved(
        world.link, {name: partial(step, name) for name in engines}, rounds, 2
    )
    rows = [
        {
            "method": name,
            "hosts": world.size,
            "algorithm": engines[name].algorithm,
            **summarize_times(seconds[name]),
            "faster": median_ratio(seconds["plain"], seconds[name]),
            "bytes_per_step": bytes_sent[name],
        }
        for name in engines
    ]
    speed_ups = {row["method"]: row["faster"] for row in rows}
    min_speed_ups = {method: by_hosts[world.size > 2] for method, by_hosts in MIN_SPEED_UP.items()}
    claims = {
        f"{method}: {speed_ups[method]:.2f} >= {minimum} x plain": speed_ups[method] >= minimum
        for method, minimum in min_speed_ups.items()
    }
    conditions = {"link": link, "widths": WIDTHS, "batch_per_rank": BATCH_PER_RANK}
    report_result(world, f"compression-steps-{world.size}-hosts", rows, claims, **conditions)


def ring_options(name: str) -> Row:
    """Return the fastest way here: a ring for long messages; `auto`'s guess only for short ones."""
    return RING_OPTIONS if name in ("plain", "bf16", "fp16") else {}


def make_engine(world: World, engine_options: dict[str, Any]) -> Any:
    """Return an engine of its own, with a model of its own."""
    model = nn.MlpOptions(widths=WIDTHS).build((WIDTHS[0],), WIDTHS[-1])
    replica = ModelReplica(model, 0, np.dtype(np.float32))
    return AllReduce(**engine_options).build(world, replica, optim.sgd(rate=1e-4, momentum=0.9))


def make_task(world: World) -> Task:
    rng = np.random.default_rng(world.rank)
    x = rng.standard_normal((BATCH_PER_RANK, WIDTHS[0]), np.float32)
    batch = Batch.of(x, rng.integers(0, WIDTHS[-1], BATCH_PER_RANK))
    return Task(batch, 1 / (BATCH_PER_RANK * world.size), nn.Key(0, 0, 0))


def measure_accuracy(epochs: int, seeds: Sequence[int]) -> int:
    """Train on mnist with each method and seed."""
    rows = [train_row(name, epochs, seed) for name in METHODS for seed in seeds]
    mean_accuracy = {
        method: float(np.mean([row["test_accuracy"] for row in rows if row["method"] == method]))
        for method in METHODS
    }
    minimum = mean_accuracy["plain"] - MAX_ACCURACY_LOSS
    claims = {
        f"{method}: {accuracy:.4f} >= {minimum:.4f}, plain less {MAX_ACCURACY_LOSS}": (
            accuracy >= minimum
        )
        for method, accuracy in mean_accuracy.items()
        if method != "plain"
    }
    report_result(worlds.init(), "compression-accuracy", rows, claims, ranks=RANKS, model="resnet8",
          epochs=epochs)  # fmt: skip
    return 0


def train_row(name: str, epochs: int, seed: int) -> Row:
    """Return what a run came to."""
    settings = ["wire.algorithm=ring"]  # or threads would sum in the memory that they share
    settings += [f"wire.{key}={value}" for key, value in METHODS[name].items()]
    spec = recipe.load(
        "mnist", [*SMALL_MODEL, f"run.epochs={epochs}", f"run.seed={seed}", *settings]
    )
    with tempfile.TemporaryDirectory() as folder, threadpoolctl.threadpool_limits(1):
        start = perf_counter()
        summary = run_ranks(
            RANKS,
            lambda link: runs.train(spec, worlds.over_threads(link), Path(folder) / "run", False),
            timeout_s=600,
        )[0]
    row = {"method": name, "seed": seed, **{key: summary[key] for key in SUMMARY_KEYS}}
    row["seconds"] = round(perf_counter() - start, 1)
    print(*(f"{key}={value}" for key, value in row.items()), flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
