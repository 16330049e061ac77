"""A short computation on every core, since one slow or shared core delays all ranks.

Each core is assigned to one of the ranks that may run on it. A rank measures its cores one after
the other, while all ranks of the node measure at once, as in training. On a core shared with other
work, the CPU time of the thread is less than the wall time. This share has an absolute limit rather
than one relative to the median, since all cores of a busy node may be slow.

Cost: about 30 ms per core assigned to a rank, at most 4 s for one rank on 128 cores, and twice that
on busy cores. The output grows linearly with the cores of the job.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.hardware import quota
from hpctrain.hardware.pci import parse_core_list
from hpctrain.tools.doctor.check import Check, compute_median_mad
from hpctrain.tools.doctor.node import MORE_CPU_TIME
from hpctrain.transport.placement.check import FEWER_THREADS_REMEDY, RankBinding
from hpctrain.transport.placement.core_binding import bind_thread_to_core

ARRAY_LENGTH, CALL_COUNT = 4096, 60_000  # 32 KiB, which fit the L1 cache; about 30 ms
#: The smallest share of CPU time of a thread that has a core to itself. A thread that shares its
#: core with another thread gets half; a daemon that wakes up once leaves 7/8 of 30 ms.
MIN_CPU_SHARE = 0.8
TOO_NOISY = "too noisy to conclude from times of links"


@dataclass(frozen=True)
class CoreTiming:
    """Wall time of the computation on one core, and the share of it that was CPU time."""

    rank: int
    host: str
    core: int
    seconds: float
    share: float
    quota: float | None = None  #: its rank's CPU time in cores; None: no limit


def assign_cores(bindings: Sequence[RankBinding], machines: Sequence[str]) -> list[list[int]]:
    """Return the cores that each rank measures; every core has one rank, in balanced shares."""
    cores_of_ranks: list[list[int]] = [[] for _ in bindings]
    for machine in dict.fromkeys(machines):
        ranks = [rank for rank, rank_machine in enumerate(machines) if rank_machine == machine]
        allowed_cores = {rank: set(parse_core_list(bindings[rank].cores)) for rank in ranks}
        for core in sorted(set().union(*allowed_cores.values())):
            candidate_ranks = [rank for rank in ranks if core in allowed_cores[rank]]
            cores_of_ranks[min(candidate_ranks, key=lambda rank: len(cores_of_ranks[rank]))].append(
                core
            )
    return cores_of_ranks


def measure_cores(rank: int, host: str, cores: Iterable[int]) -> list[CoreTiming]:
    """Return a measurement of each of `cores` to which the thread can be bound."""
    timings, quota_cores = [], quota.quota_cores()
    for core in cores:
        try:
            with bind_thread_to_core(core):
                timings.append(CoreTiming(rank, host, core, *_measure_best_of_two(), quota_cores))
        except OSError:  # meanwhile the rank has lost this core
            continue
    return timings


def check_cores(timings: Sequence[CoreTiming]) -> Check:
    """Return the check of the cores' speed."""
    if not timings:
        return Check("speed of cores", "note", "no core could be measured")
    stats = compute_median_mad([timing.seconds for timing in timings])
    observed = f"{len(timings)} cores, median {stats.median * 1e3:.1f} ms for a short computation"
    slow_cores = [
        timing for timing in timings if timing.seconds > stats.limit or timing.share < MIN_CPU_SHARE
    ]
    slow_cores.sort(key=lambda timing: -timing.seconds)
    if not slow_cores:
        min_share = min(1.0, *(timing.share for timing in timings))
        observed += f", given {min_share:.0%} of their time or more"
        return Check("speed of cores", "ok", observed)
    slow_texts = [
        f"core {timing.core} of {timing.host} (rank {timing.rank}): "
        f"{stats.format_ratio(timing.seconds)}{_describe_cause(timing)}"
        for timing in slow_cores[:4]
    ]
    observed += f", MAD {stats.mad * 1e3:.1f}; {'; '.join(slow_texts)}"
    observed += f"; and {len(slow_cores) - 4} more" * (len(slow_cores) > 4)
    if any(core.share < MIN_CPU_SHARE for core in slow_cores):
        observed += f"; {TOO_NOISY}"
    nodes = tuple(dict.fromkeys(timing.host for timing in slow_cores))
    return Check("speed of cores", "slow", observed, _slow_core_remedy(slow_cores[0]), nodes)


def check_quotas(
    bindings: Sequence[RankBinding], quota_by_host: Mapping[str, float | None]
) -> list[Check]:
    """Return the check of the nodes' CPU quotas; [] if no quota limits CPU time."""
    threads_by_host: Counter[str] = Counter()
    for binding in bindings:
        threads_by_host[binding.host] += binding.blas_threads
    limits = {host: limit for host, limit in quota_by_host.items() if limit is not None}
    exceeded_limits = {
        host: limit for host, limit in limits.items() if threads_by_host[host] > max(1, limit)
    }
    if not limits:
        return []
    host = min(exceeded_limits or limits, key=limits.__getitem__)
    observed = (
        f"{threads_by_host[host]} BLAS threads on {host}, quota: the time of {limits[host]:g} cores"
    )
    if not exceeded_limits:
        return [Check("CPU quota", "ok", observed)]
    observed += f", and {len(exceeded_limits) - 1} nodes like it" * (len(exceeded_limits) > 1)
    observed += ": threads are stopped when the quota is used up"
    remedy = f"{FEWER_THREADS_REMEDY}, or ask for more: {MORE_CPU_TIME}"
    return [Check("CPU quota", "bad", observed, remedy)]


def _slow_core_remedy(core: CoreTiming) -> str:
    if _is_throttled(core):
        return f"ask for more CPU time ({MORE_CPU_TIME}), or start fewer ranks"
    return (
        f"see what else runs there (on {core.host}: ps -eLo psr,pcpu,pid,user,comm | awk '$1 == "
        f"{core.core}'), ask for whole nodes (srun --exclusive), or leave the node out"
    )


def _is_throttled(core: CoreTiming) -> bool:
    return core.share < MIN_CPU_SHARE and core.quota is not None


def _describe_cause(core: CoreTiming) -> str:
    share = f", given {core.share:.0%} of its time"
    if _is_throttled(core):
        return f"{share}: a quota of {core.quota:g} cores"
    if core.share < MIN_CPU_SHARE:
        return f"{share} (expected: {MIN_CPU_SHARE:.0%}): something else runs there"
    return ", all of its time: a slow core, a hot one, or another model"


def _measure_best_of_two() -> tuple[float, float]:
    """Return the result of `_time_computation`; on a shared core the better of two tries."""
    first_timing = _time_computation()
    return (
        first_timing
        if first_timing[1] >= MIN_CPU_SHARE
        else max(first_timing, _time_computation(), key=lambda timing: timing[1])
    )


def _time_computation() -> tuple[float, float]:
    x, y = np.zeros(ARRAY_LENGTH // 2), np.ones(ARRAY_LENGTH // 2)
    np.add(x, y, out=x)  # moves the thread to its core and the arrays into the cache
    start, cpu_start = time.perf_counter(), time.thread_time()
    for _ in range(CALL_COUNT):
        np.add(x, y, out=x)
    seconds = time.perf_counter() - start
    return seconds, (time.thread_time() - cpu_start) / seconds
