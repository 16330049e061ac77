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
from _common import interleaved, options, spread, world_of, write

from hpctrain import collectives, engines, nn, optim
from hpctrain.bench.training_step.profile import profile_step
from hpctrain.cluster.netlab.netlab import Lab, bits_of, netlab
from hpctrain.collectives import Group
from hpctrain.core import launchers
from hpctrain.cost_model import fit
from hpctrain.cost_model.loggp import Clocks, Cluster
from hpctrain.cost_model.message_schedules import SCHEDULES
from hpctrain.cost_model.training_step import step_time
from hpctrain.engines import Flags, Task
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.nn import Key
from hpctrain.transport.link import Link
from hpctrain.tuning.measure import timed
from hpctrain.world import World

KIB, MIB = 1 << 10, 1 << 20
MESSAGES = [4, KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB]
SIZES = [4 * MIB, 8 * MIB, 16 * MIB]  # far more than a shaped link lets through at once
ALGORITHMS = ("ring", "tree", "double-tree", "recursive-doubling", "halving-doubling")
CLAIMED = ("ring", "tree", "halving-doubling")
WIDTHS, BATCH, BUCKET = [784, 1024, 1024, 10], 32, MIB


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--link", default="1gbit")
    arguments = parser.parse_args()
    world = world_on(arguments.hosts, arguments.ranks, arguments.link)
    cluster, found = measured(world, arguments.rounds)
    clocks = partial(Clocks, cluster, np.unique(world.hosts, return_inverse=True)[1])
    rows = [*allreduces(world, clocks, arguments.rounds), *steps(world, clocks, arguments.rounds)]
    worst = {name: max(abs(r["error"]) for r in rows if r["algorithm"] == name) for name in CLAIMED}
    worst["a step"] = max(abs(row["error"]) for row in rows if row["operation"] == "step")
    # In a node, cores and memory are what messages wait for, and the model's wires are not.
    claims = {
        f"{name} within {error:.1%}, <= 15 %": error <= 0.15
        for name, error in worst.items()
        if arguments.hosts > 1
    }
    where = f"{arguments.hosts}-hosts-{arguments.link}" if arguments.hosts > 1 else "local"
    write(world, f"predict-{where}-{world.size}-ranks", rows, claims, fitted=found)


def world_on(hosts: int, ranks: int, link: str) -> World:
    """Return the World of a rank on each of `hosts`, or of `ranks` ranks here; see world_of."""
    if hosts > 1 and launchers.launched(os.environ).size == 1:
        sys.exit(netlab(Lab(hosts, 1, bits_of(link)), [sys.executable, *sys.argv]))
    return world_of(ranks)


def measured(world: World, rounds: int) -> tuple[Cluster, dict[str, Any]]:
    """Return the machine fitted to single messages and additions, and what was measured."""
    link = world.link
    ways = (one_way, there_and_back, both_ways)
    found = {way.__name__: times(link, way, rounds) for way in ways}
    wire = fit.wire(*found.values(), overhead(link, rounds))
    gamma = adding(link, rounds)
    return Cluster(wire, wire, gamma, gamma / 3), {**found, "wire": vars(wire), "gamma": gamma}


def times(link: Link, way: Any, rounds: int) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of messages of each length, taken in turn."""
    calls = {nbytes: way(link, nbytes) for nbytes in MESSAGES}
    seconds: dict[int, list[float]] = {nbytes: [] for nbytes in MESSAGES}
    for _ in range(rounds + 1):
        for nbytes, (call, messages) in calls.items():
            seconds[nbytes].append(timed(link, call) / messages)
    return [(m, said_by_0(link, float(np.median(some[1:])))) for m, some in seconds.items()]


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


def overhead(link: Link, rounds: int) -> float:
    """Return the seconds of the call that starts a short send."""
    x, taken = np.zeros(4, np.uint8), []
    for _ in range(10 * rounds):
        start = time.perf_counter()
        if link.rank == 0:
            request = link.isend(x, 1)
            taken.append(time.perf_counter() - start)
            request.wait()
        elif link.rank == 1:
            link.irecv(x, 0).wait()
        link.barrier()
    return said_by_0(link, float(np.median(taken)) if taken else 0.0)


def adding(link: Link, rounds: int) -> float:
    """Return seconds per byte added: a segment in the cache to a vector in memory, on all ranks."""
    x, inbox = np.zeros(8 * MIB, np.float32), np.zeros(MIB // 4, np.float32)

    def add() -> None:
        for start in range(0, x.size, inbox.size):
            part = x[start : start + inbox.size]
            np.add(part, inbox, out=part)

    return median(link, add, rounds) / x.nbytes


def median(link: Link, function: Any, rounds: int) -> float:
    """Return the median seconds, the same on every rank."""
    function()
    return said_by_0(link, float(np.median([timed(link, function) for _ in range(rounds)])))


def said_by_0(link: Link, number: float) -> float:
    said = np.array([number])
    collectives.broadcast(Group(link), said)
    return float(said[0])


def allreduces(world: World, clocks: Any, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield rows of all-reduces, predicted and measured."""
    for nbytes in SIZES:
        x = np.zeros(nbytes // 4, np.float32)
        calls = {
            name: partial(collectives.ALLREDUCE[name], world.main, x, np.add) for name in ALGORITHMS
        }
        for name, seconds in interleaved(world.link, calls, rounds).items():
            at = clocks()
            SCHEDULES[name](at, nbytes)
            yield row("allreduce", name, nbytes, world, float(at.now.max()), seconds)


def steps(world: World, clocks: Any, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield rows of whole steps of an MLP, predicted and measured."""
    for algorithm in CLAIMED:
        replica, task, sgd = *a_model(world), optim.sgd(rate=1e-6, momentum=0.9)
        world.link.barrier()
        step = profile_step(replica, sgd, task, BUCKET, rounds)
        predicted = step_time(step, SCHEDULES[algorithm], clocks())
        engine_is = engines.AllReduce(algorithm=algorithm, bucket_bytes=BUCKET)
        engine = engine_is.build(world, replica, sgd)
        seconds = interleaved(world.link, {"": partial(engine.step, task, Flags())}, rounds)[""]
        engine.close()
        nbytes = replica.arena.grad.nbytes
        about = {"compute_s": step.compute, "predicted_exposed_s": predicted.exposed}
        yield row("step", algorithm, nbytes, world, predicted.step, seconds) | about


def a_model(world: World) -> tuple[ModelReplica, Task]:
    layers = nn.MODELS["mlp"](widths=WIDTHS).build(None, None)
    x = np.random.default_rng(world.rank).normal(size=(BATCH, WIDTHS[0])).astype(np.float32)
    batch = Batch(x, np.arange(BATCH) % WIDTHS[-1])
    return ModelReplica(layers, 0, np.float32), Task(batch, 1e-3, Key(0, 0, 0))


def row(
    operation: str,
    algorithm: str,
    nbytes: int,
    world: World,
    predicted: float,
    seconds: list[float],
) -> dict[str, Any]:
    found = spread(seconds)
    return {
        "operation": operation,
        "algorithm": algorithm,
        "bytes": nbytes,
        "ranks": world.size,
        "predicted_s": predicted,
        **found,
        "error": predicted / found["median_s"] - 1,
    }


if __name__ == "__main__":
    main()
