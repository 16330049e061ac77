"""Compute time of one rank in a training step: when each bucket is full, and the update."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from hpctrain.cost_model.training_step import Step
from hpctrain.engines import Task
from hpctrain.engines.engine import identity_total
from hpctrain.gradients import buckets
from hpctrain.gradients.buckets import Bucket
from hpctrain.gradients.replica import Replica
from hpctrain.optim import Optimizer


def profile(
    replica: Replica,
    optimizer: Optimizer,
    task: Task,
    bucket_bytes: int,
    rounds: int = 7,
    warm_up: int = 2,
) -> Step:
    """Return the medians of `rounds` steps on `task` without communication; trains the model."""
    arena = replica.arena
    bucket_list = buckets.cut_buckets(
        arena.slots, arena.grad.size, arena.grad.itemsize, bucket_bytes
    )
    state, timings = optimizer.init(arena.param), []
    for _ in range(warm_up + rounds):
        full = _full(replica, task, bucket_list)
        start = perf_counter()
        optimizer.update(arena.grad, state, arena.param, arena.slots, identity_total)
        timings.append([*full, perf_counter() - start])
    *full, update = np.median(timings[warm_up:], axis=0).tolist()
    lengths = (float((bucket.stop - bucket.start) * arena.grad.itemsize) for bucket in bucket_list)
    return Step(tuple(full), tuple(lengths), update)


def _full(replica: Replica, task: Task, bucket_list: list[Bucket]) -> list[float]:
    """Return the seconds of one gradient until each bucket, and all before it, are full."""
    stamps: dict[str, float] = {}
    start = perf_counter()
    replica.gradient(task.batch, task.scale, task.key, lambda name: _stamp(stamps, name))
    stamps[""] = perf_counter()  # time after the last slot counts for the last bucket
    names = [*(bucket.names for bucket in bucket_list[:-1]), bucket_list[-1].names | {""}]
    last_stamps = [max(stamps[name] for name in slot_names) - start for slot_names in names]
    return np.maximum.accumulate(last_stamps).tolist()


def _stamp(stamps: dict[str, float], name: str) -> None:
    stamps[name] = perf_counter()
