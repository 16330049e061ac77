"""One training in a study of regimes: ranks as threads, looked at from outside while it runs.

Compute is a sleep of `step_ms` and a small model, so that threads of one process do what ranks on
cores of their own would do. Another thread looks at the parameters that would be evaluated, every
LOOK_S, without stopping anybody: regimes whose workers never meet are not made to meet.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import threadpoolctl

from hpctrain import data, nn, optim
from hpctrain import world as worlds
from hpctrain.core import config
from hpctrain.data import Sampler, Split, share
from hpctrain.engines import ENGINES, Engine, Flags, Task
from hpctrain.engines.staleness import metrics
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.training.faults import FaultsOptions, Slowdown, SlowedReplica
from hpctrain.transport.link import Link
from hpctrain.transport.threads.ranks import run_ranks

POLL_S = 0.02
REQUIRED_HITS = 3
Table = Mapping[str, Any]


@dataclass(frozen=True)
class Trial:
    """What is trained, and until when."""

    engine: Table  #: as in a recipe
    optimizer: Table
    workers: int
    seed: int = 0
    servers: int = 0  #: ranks beside the workers
    data: str = "digits"
    hidden: int = 128
    batch: int = 128
    schedule: str = "constant"
    steps: int = 10_000
    target: float = 2.0  #: end when the test accuracy is this, at HELD steps in a row
    limit_s: float = 60.0
    faults: Table = field(default_factory=dict)


class WorkerTasks:
    """The tasks of one worker: see `hpctrain.engines.Work`."""

    max_drops = 0

    def __init__(
        self, engine: Engine, train: data.Dataset, trial: Trial, stop_event: threading.Event
    ):
        self.step = 0
        self._engine, self._train, self._stop_event = engine, train, stop_event
        self._sampler = Sampler(len(train), trial.batch, trial.seed)

    def task(self, step: int) -> Task:
        indexes = self._sampler.batch_indexes(step)
        first, own = share(indexes, self._engine.worker or 0, self._engine.workers)
        targets = len(own) if self._engine.asynchronous else len(indexes)
        key = nn.Key(self._sampler.seed, step, first)
        return Task(Batch.of(*self._train.rows(own)), 1 / max(targets, 1), key)

    def record(self, step: int, sums: nn.Sums) -> None:
        self.step = step

    def flags(self) -> Flags:
        return Flags(stop=int(self._stop_event.is_set()))


class Watcher:
    """Looks at a training: `curve` has (seconds, step, test accuracy) of each look."""

    def __init__(self, trial: Trial, stop_event: threading.Event):
        self.curve: list[tuple[float, int, float]] = []
        self.engines: dict[int, Engine] = {}
        self.worker_tasks: dict[int, WorkerTasks] = {}
        self._hit_times: dict[int, float] = {}  # steps at which the target was seen, when first
        self._trial, self._stop_event = trial, stop_event
        self._replica, self._test = make_replica(trial), load_split(trial.data).test
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        self._start = time.perf_counter()
        self._thread.start()

    def stop(self) -> float:
        """Return the seconds since the start."""
        self._stop_event.set()
        self._thread.join()
        return time.perf_counter() - self._start

    def _watch(self) -> None:
        while not self._stop_event.wait(POLL_S):
            elapsed_s = time.perf_counter() - self._start
            accuracy = self.accuracy()
            step = max(tasks.step for tasks in self.worker_tasks.values())
            self.curve.append((round(elapsed_s, 4), step, round(accuracy, 4)))
            if accuracy < self._trial.target:
                self._hit_times.clear()
            else:
                self._hit_times.setdefault(step, elapsed_s)
            if len(self._hit_times) == REQUIRED_HITS or elapsed_s > self._trial.limit_s:
                self._stop_event.set()

    @property
    def reached_s(self) -> float | None:
        """When the target was first seen of HELD times in a row, each at another step."""
        return min(self._hit_times.values()) if len(self._hit_times) == REQUIRED_HITS else None

    def accuracy(self) -> float:
        """Return the test accuracy of what would be evaluated now."""
        self._replica.arena.param[:] = evaluated_parameters(list(self.engines.values()))
        sums = self._replica.evaluate(Batch.of(self._test.x, self._test.y))
        return sums["accuracy"].mean


def evaluated_parameters(engines: Sequence[Any]) -> np.ndarray:
    """Return what is evaluated: what servers keep; else the mean of all workers."""
    shards = [e._server.shard.param for e in engines if getattr(e, "_server", None)]
    if shards:
        return np.concatenate(shards)
    return np.mean([worker_parameters(e) for e in engines], axis=0)


def worker_parameters(engine: Any) -> np.ndarray:
    """Return a worker's own parameters; while it computes, others may average with a copy."""
    local_state = getattr(engine, "_side", None)
    return getattr(local_state, "_x", engine.replica.arena.param)


def run(trial: Trial) -> dict[str, Any]:
    """Train; return when the target was reached (None: never), the end, and what was measured."""
    sys.setswitchinterval(2e-4)  # a rank that wakes up does not wait for 5 ms
    stop_event = threading.Event()
    watcher = Watcher(trial, stop_event)
    with threadpoolctl.threadpool_limits(1), np.errstate(all="ignore"):
        try:
            size = trial.workers + trial.servers
            results = run_ranks(size, lambda link: _train_rank(link, trial, watcher), timeout_s=60)
        finally:
            stop_event.set()
    return {**results[0], "time_to_target_s": watcher.reached_s, "curve": watcher.curve}


def _train_rank(link: Link, trial: Trial, watcher: Watcher) -> dict[str, Any]:
    world = worlds.over_threads(link)
    pace = Slowdown(config.read(FaultsOptions, trial.faults, "faults"), world.rank)
    replica = SlowedReplica(make_replica(trial), pace)
    options = config.read_kind(ENGINES, trial.engine, "engine")
    engine = options.build(world, replica, make_optimizer(trial))
    worker_tasks = WorkerTasks(engine, load_split(trial.data).train, trial, watcher._stop_event)
    watcher.engines[world.rank], watcher.worker_tasks[world.rank] = engine, worker_tasks
    link.barrier()
    if world.rank == 0:
        watcher.start()
    step, flags = engine.train(worker_tasks, 0, trial.steps)
    return _collect_result(world, engine, watcher, step, flags)


def _collect_result(
    world: worlds.World, engine: Engine, watcher: Watcher, step: int, flags: Flags
) -> dict[str, Any]:
    world.link.barrier()
    wall_s = watcher.stop() if world.rank == 0 else 1.0
    idle_s = np.zeros(world.size)
    idle_s[world.rank] = engine.times.wait_s
    idle_s, bytes_sent = engine.sum(idle_s), engine.sum(np.array([float(engine.bytes_sent)]))
    engine.settle()
    world.link.barrier()
    result = {
        "accuracy": watcher.accuracy() if world.rank == 0 else 0.0,
        "diverged": bool(flags.failed),
        "steps": step,
        "wall_s": wall_s,
        "bytes_sent_per_rank": float(bytes_sent[0]) / world.size,
        "idle_fraction": (idle_s / wall_s).round(3).tolist(),
        **metrics(engine.staleness),
    }
    world.link.barrier()
    engine.close()
    return result


def make_optimizer(trial: Trial) -> optim.Optimizer:
    options = config.read_kind(optim.OPTIMIZERS, dict(trial.optimizer), "optimizer")
    schedule = optim.SCHEDULES[trial.schedule]()
    return options.build(schedule.build(options.rate, 1, trial.steps))


def make_replica(trial: Trial) -> ModelReplica:
    train = load_split(trial.data).train
    widths = [int(np.prod(train.sample_shape)), trial.hidden, 10]
    model = nn.MlpOptions(widths=widths).build(train.sample_shape, 10)
    return ModelReplica(model, trial.seed, np.dtype("float32"))


@cache
def load_split(name: str) -> Split:
    return data.DATA[name]().load(0)
