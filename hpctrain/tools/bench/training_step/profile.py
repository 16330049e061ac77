"""A rank's compute times in a training step: until each bucket is full, and the update."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from hpctrain.engines import Task
from hpctrain.gradients import buckets
from hpctrain.gradients.buckets import Bucket
from hpctrain.gradients.replica import Replica
from hpctrain.optim import Optimizer
from hpctrain.tuning.model.training_step import Step


def profile_step(
    replica: Replica,
    optimizer: Optimizer,
    task: Task,
    bucket_bytes: int,
    rounds: int = 7,
    warm_up: int = 2,
) -> Step:
    """Return the median times of `rounds` steps without communication; trains the model."""
    arena = replica.arena
    bucket_list = buckets.cut_buckets(
        arena.slots, arena.grad.size, arena.grad.itemsize, bucket_bytes
    )
    optimizer_state, round_times = optimizer.init(arena.param), []
    for _ in range(warm_up + rounds):
        full_times = _bucket_times(replica, task, bucket_list)
        start = perf_counter()
        arrays = arena.grad, optimizer_state, arena.param
        optimizer.update(*arrays, arena.layout, arena.gather_rows)
        round_times.append([*full_times, perf_counter() - start])
    *full_times, update_s = np.median(round_times[warm_up:], axis=0).tolist()
    bucket_bytes_list = (
        float((bucket.stop - bucket.start) * arena.grad.itemsize) for bucket in bucket_list
    )
    return Step(tuple(full_times), tuple(bucket_bytes_list), update_s)


def _bucket_times(replica: Replica, task: Task, bucket_list: list[Bucket]) -> list[float]:
    """Compute one gradient; return the seconds until each bucket and all before it are full."""
    times_by_name: dict[str, float] = {}
    start = perf_counter()
    replica.gradient(
        task.batch, task.scale, task.key, lambda name: _record_time(times_by_name, name)
    )
    times_by_name[""] = perf_counter()  # the end of backward counts for the last bucket
    slots_by_bucket = [*(bucket.names for bucket in bucket_list[:-1]), bucket_list[-1].names | {""}]
    full_times = [
        max(times_by_name[name] for name in slot_names) - start for slot_names in slots_by_bucket
    ]
    return np.maximum.accumulate(full_times).tolist()


def _record_time(times_by_name: dict[str, float], name: str) -> None:
    times_by_name[name] = perf_counter()
