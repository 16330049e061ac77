"""Claims: from times of single messages and of additions the model predicts all-reduces and whole
training steps on several hosts within 15 %.

    python benchmarks/predict.py --hosts 4 --link 1gbit [--rounds 15]
    python benchmarks/predict.py --ranks 2                               (reported only)
    python benchmarks/plots/predict.py

L, o, g and G are fitted to messages between ranks 0 and 1 (there and back, and one way), gamma to
additions on all ranks at once, and what ranks compute to a step without communication. No
all-reduce is looked at before it is predicted.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from lib.common import make_parser, report_result, start_world, summarize_times, time_interleaved

from hpctrain import collectives, engines, nn, optim
from hpctrain.cluster.netlab.netlab import Lab, netlab, parse_speed
from hpctrain.collectives import Group
from hpctrain.core import launchers
from hpctrain.engines import Flags, Task
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.nn import Key
from hpctrain.tools.bench.prediction.command import profile_step
from hpctrain.transport.link import Link
from hpctrain.tuning.measure import time_calls
from hpctrain.tuning.model import fit
from hpctrain.tuning.model.loggp import Clocks, Cluster
from hpctrain.tuning.model.message_schedules import SCHEDULES
from hpctrain.tuning.model.training_step import step_time
from hpctrain.world import World

KIB, MIB = 1 << 10, 1 << 20
MESSAGES = [4, KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB]
SIZES = [4 * MIB, 8 * MIB, 16 * MIB]  # far more than a shaped link lets through at once
ALGORITHMS = ("ring", "tree", "double-tree", "recursive-doubling", "halving-doubling")
CLAIMED_ALGORITHMS = ("ring", "tree", "halving-doubling")
WIDTHS, BATCH, BUCKET = [784, 1024, 1024, 10], 32, MIB


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--link", default="1gbit")
    arguments = parser.parse_args()
    world = start_world_on(arguments.hosts, arguments.ranks, arguments.link)
    cluster, measurements = fit_machine(world, arguments.rounds)
    clocks = partial(Clocks, cluster, np.unique(world.hosts, return_inverse=True)[1])
    rows = [
        *allreduce_rows(world, clocks, arguments.rounds),
        *step_rows(world, clocks, arguments.rounds),
    ]
    worst = {
        name: max(abs(r["error"]) for r in rows if r["algorithm"] == name)
        for name in CLAIMED_ALGORITHMS
    }
    worst["a step"] = max(abs(row["error"]) for row in rows if row["operation"] == "step")
    # In a node, cores and memory are what messages wait for, and the model's wires are not.
    claims = {
        f"{name} within {error:.1%}, <= 15 %": error <= 0.15
        for name, error in worst.items()
        if arguments.hosts > 1
    }
    place = f"{arguments.hosts}-hosts-{arguments.link}" if arguments.hosts > 1 else "local"
    report_result(world, f"predict-{place}-{world.size}-ranks", rows, claims, fitted=measurements)


def start_world_on(hosts: int, ranks: int, link: str) -> World:
    """Return the World of a rank on each of `hosts`, or of `ranks` ranks here; see world_of."""
    if hosts > 1 and launchers.launched(os.environ).size == 1:
        sys.exit(netlab(Lab(hosts, 1, parse_speed(link)), [sys.executable, *sys.argv]))
    return start_world(ranks)


def fit_machine(world: World, rounds: int) -> tuple[Cluster, dict[str, Any]]:
    """Return the machine fitted to single messages and additions, and what was measured."""
    link = world.link
    patterns = (one_way, there_and_back, both_ways)
    measurements = {pattern.__name__: message_times(link, pattern, rounds) for pattern in patterns}
    wire = fit.fit_wire(*measurements.values(), send_overhead(link, rounds))
    gamma = time_per_byte_added(link, rounds)
    return Cluster(wire, wire, gamma, gamma / 3), {
        **measurements,
        "wire": vars(wire),
        "gamma": gamma,
    }


def message_times(link: Link, pattern: Any, rounds: int) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of messages of each length, taken in turn."""
    calls = {nbytes: pattern(link, nbytes) for nbytes in MESSAGES}
    seconds: dict[int, list[float]] = {nbytes: [] for nbytes in MESSAGES}
    for _ in range(rounds + 1):
        for nbytes, (call, messages) in calls.items():
            seconds[nbytes].append(time_calls(link, call) / messages)
    return [
        (nbytes, broadcast_number(link, float(np.median(times[1:]))))
        for nbytes, times in seconds.items()
    ]


def one_way(link: Link, nbytes: int) -> tuple[Any, int]:
    """Return a call that sends many messages in a row from rank 0 to 1, and how many."""
    count = max(8, min(500, 8 * MIB // nbytes))  # far more than a shaped link lets through at once
    x, answer = np.zeros((count, nbytes), np.uint8), np.zeros(1, np.uint8)

    def call() -> None:
        if link.rank == 0:
            for request in [link.isend(part, 1) for part in x]:
                request.wait()
            link.irecv(answer, 1).wait()
        elif link.rank == 1:
            for request in [link.irecv(part, 0) for part in x]:
                request.wait()
            link.isend(answer, 0).wait()

    return call, count


def there_and_back(link: Link, nbytes: int) -> tuple[Any, int]:
    """Return a call that sends a message from rank 0 to 1 and back, again and again."""
    count = max(1, min(50, MIB // nbytes))
    x = np.zeros(nbytes, np.uint8)

    def call() -> None:
        for turn in range(2 * count):
            if link.rank == turn % 2:
                link.isend(x, 1 - link.rank).wait()
            elif link.rank < 2:
                link.irecv(x, 1 - link.rank).wait()

    return call, 2 * count


def both_ways(link: Link, nbytes: int) -> tuple[Any, int]:
    """Return a call in which ranks 0 and 1 send to each other at once, again and again."""
    count = max(2, min(50, MIB // nbytes))
    x, inbox = np.zeros((2, nbytes), np.uint8)

    def call() -> None:
        for _ in range(count if link.rank < 2 else 0):
            link.sendrecv(x, 1 - link.rank, inbox, 1 - link.rank)

    return call, count


def send_overhead(link: Link, rounds: int) -> float:
    """Return the seconds of the call that starts a short send."""
    x, durations = np.zeros(4, np.uint8), []
    for _ in range(10 * rounds):
        start = time.perf_counter()
        if link.rank == 0:
            request = link.isend(x, 1)
            durations.append(time.perf_counter() - start)
            request.wait()
        elif link.rank == 1:
            link.irecv(x, 0).wait()
        link.barrier()
    return broadcast_number(link, float(np.median(durations)) if durations else 0.0)


def time_per_byte_added(link: Link, rounds: int) -> float:
    """Return seconds per byte added: a segment in the cache to a vector in memory, on all ranks."""
    x, inbox = np.zeros(8 * MIB, np.float32), np.zeros(MIB // 4, np.float32)

    def add() -> None:
        for start in range(0, x.size, inbox.size):
            part = x[start : start + inbox.size]
            np.add(part, inbox, out=part)

    return median_time(link, add, rounds) / x.nbytes


def median_time(link: Link, function: Any, rounds: int) -> float:
    """Return the median seconds, the same on every rank."""
    function()
    return broadcast_number(
        link, float(np.median([time_calls(link, function) for _ in range(rounds)]))
    )


def broadcast_number(link: Link, number: float) -> float:
    buffer = np.array([number])
    collectives.broadcast(Group(link), buffer)
    return float(buffer[0])


def allreduce_rows(world: World, clocks: Any, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield rows of all-reduces, predicted and measured."""
    for nbytes in SIZES:
        x = np.zeros(nbytes // 4, np.float32)
        calls = {
            name: partial(collectives.ALLREDUCE[name], world.main, x, np.add) for name in ALGORITHMS
        }
        for name, seconds in time_interleaved(world.link, calls, rounds).items():
            clocks_now = clocks()
            SCHEDULES[name](clocks_now, nbytes)
            yield make_row("allreduce", name, nbytes, world, float(clocks_now.now.max()), seconds)


def step_rows(world: World, clocks: Any, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield rows of whole steps of an MLP, predicted and measured."""
    for algorithm in CLAIMED_ALGORITHMS:
        replica, task, sgd = *make_model(world), optim.sgd(rate=1e-6, momentum=0.9)
        world.link.barrier()
        step = profile_step(replica, sgd, task, BUCKET, rounds)
        predicted = step_time(step, SCHEDULES[algorithm], clocks())
        options_ = engines.AllReduce(algorithm=algorithm, bucket_bytes=BUCKET)
        engine = options_.build(world, replica, sgd)
        seconds = time_interleaved(world.link, {"": partial(engine.step, task, Flags())}, rounds)[
            ""
        ]
        engine.close()
        nbytes = replica.arena.grad.nbytes
        about = {"compute_s": step.compute, "predicted_exposed_s": predicted.exposed}
        yield make_row("step", algorithm, nbytes, world, predicted.step, seconds) | about


def make_model(world: World) -> tuple[ModelReplica, Task]:
    layers = nn.MODELS["mlp"](widths=WIDTHS).build(None, None)
    x = np.random.default_rng(world.rank).normal(size=(BATCH, WIDTHS[0])).astype(np.float32)
    batch = Batch.of(x, np.arange(BATCH) % WIDTHS[-1])
    return ModelReplica(layers, 0, np.float32), Task(batch, 1e-3, Key(0, 0, 0))


def make_row(
    operation: str,
    algorithm: str,
    nbytes: int,
    world: World,
    predicted: float,
    seconds: list[float],
) -> dict[str, Any]:
    statistics = summarize_times(seconds)
    return {
        "operation": operation,
        "algorithm": algorithm,
        "bytes": nbytes,
        "ranks": world.size,
        "predicted_s": predicted,
        **statistics,
        "error": predicted / statistics["median_s"] - 1,
    }


if __name__ == "__main__":
    main()
