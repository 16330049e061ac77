"""A short computation on every core: one slow core, or one shared with other work, delays all.

Each core is assigned to one of the ranks that may run on it. A rank measures its cores one after
the other, while the ranks of its node run side by side, as training will use them. On a core
shared with other work the CPU time of the thread is less than the wall time. That share has a limit
of its own, not relative to the median: on a busy node all cores are alike.

Cost: some 30 ms for each core that a rank may use and no other rank tries, at most 4 s for one rank
on 128 cores, twice that on cores that are busy; the output grows as the cores of the job.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.doctor.check import Check
from hpctrain.doctor.job.outliers import median_mad
from hpctrain.doctor.node import MORE_TIME
from hpctrain.hardware import quota
from hpctrain.hardware.pci import core_list
from hpctrain.transport.placement.check import FEWER_THREADS, RankBinding
from hpctrain.transport.placement.core_binding import on_core

LENGTH, CALLS = 4096, 60_000  # 32 KiB in all, in the first cache; some 30 ms
#: The smallest share of CPU time of a thread on a core of its own. A thread that shares its core
#: with another gets half; a daemon that wakes up once leaves seven eighths of 30 ms.
MIN_SHARE = 0.8


@dataclass(frozen=True)
class CoreTiming:
    """Wall time of the computation on one core, and the share of it that was CPU time."""

    rank: int
    host: str
    core: int
    seconds: float
    share: float
    quota: float | None = None  #: CPU time of so many cores that its rank may use; None: no limit


def assign(seats: Sequence[RankBinding], machines: Sequence[str]) -> list[list[int]]:
    """Return the cores that each rank measures: each of a machine once, as evenly as possible."""
    cores_of_ranks: list[list[int]] = [[] for _ in seats]
    for machine in dict.fromkeys(machines):
        ranks = [rank for rank, name in enumerate(machines) if name == machine]
        allowed = {rank: set(core_list(seats[rank].cores)) for rank in ranks}
        for core in sorted(set().union(*allowed.values())):
            candidates = [rank for rank in ranks if core in allowed[rank]]
            cores_of_ranks[min(candidates, key=lambda rank: len(cores_of_ranks[rank]))].append(core)
    return cores_of_ranks


def measure(rank: int, host: str, cores: Iterable[int]) -> list[CoreTiming]:
    """Return a measurement of each of `cores` that the thread can be bound to."""
    timings, quota_cores = [], quota.cores()
    for core in cores:
        try:
            with on_core(core):
                timings.append(CoreTiming(rank, host, core, *_faster_timing(), quota_cores))
        except OSError:  # removed from the rank since
            continue
    return timings


def check(timings: Sequence[CoreTiming]) -> Check:
    """Return the check of the speed of all cores."""
    if not timings:
        return Check("speed of cores", "note", "none could be tried")
    stats = median_mad([core.seconds for core in timings])
    observed = f"{len(timings)} cores, median {stats.median * 1e3:.1f} ms for a short computation"
    slow_cores = [c for c in timings if c.seconds > stats.limit or c.share < MIN_SHARE]
    slow_cores.sort(key=lambda c: -c.seconds)
    if not slow_cores:
        lowest = min(1.0, *(c.share for c in timings))
        observed += f", given {lowest:.0%} of their time or more"
        return Check("speed of cores", "ok", observed)
    words = [f"core {c.core} of {c.host} (rank {c.rank}): {stats.times(c.seconds)}{_reason(c)}"
             for c in slow_cores[:4]]  # fmt: skip
    observed += f", MAD {stats.mad * 1e3:.1f}; {'; '.join(words)}"
    observed += f"; and {len(slow_cores) - 4} more" * (len(slow_cores) > 4)
    nodes = tuple(dict.fromkeys(c.host for c in slow_cores))
    return Check("speed of cores", "slow", observed, _remedy(slow_cores[0]), nodes)


def quotas(seats: Sequence[RankBinding], quota_of: Mapping[str, float | None]) -> list[Check]:
    """Return the check of the CPU quotas by node; none where no quota limits CPU time."""
    threads: Counter[str] = Counter()
    for seat in seats:
        threads[seat.host] += seat.blas_threads
    limits = {host: limit for host, limit in quota_of.items() if limit is not None}
    exceeded = {host: limit for host, limit in limits.items() if threads[host] > max(1, limit)}
    if not limits:
        return []
    host = min(exceeded or limits, key=limits.__getitem__)
    observed = f"{threads[host]} BLAS threads on {host}, quota: the time of {limits[host]:g} cores"
    if not exceeded:
        return [Check("CPU quota", "ok", observed)]
    observed += (
        f"{f', and {len(exceeded) - 1} nodes like it' * (len(exceeded) > 1)}: they are stopped"
    )
    return [Check("CPU quota", "bad", f"{observed} when it is used up",
                  f"{FEWER_THREADS}, or ask for more: {MORE_TIME}")]  # fmt: skip


def _remedy(core: CoreTiming) -> str:
    if _throttled(core):
        return f"ask for more CPU time ({MORE_TIME}), or start fewer ranks"
    return (
        f"see what else runs there (on {core.host}: ps -eLo psr,pcpu,pid,user,comm | awk '$1 == "
        f"{core.core}'), ask for whole nodes (srun --exclusive), or leave the node out"
    )


def _throttled(core: CoreTiming) -> bool:
    return core.share < MIN_SHARE and core.quota is not None


def _reason(core: CoreTiming) -> str:
    share = f", given {core.share:.0%} of its time"
    if _throttled(core):
        return f"{share}: a quota of {core.quota:g} cores"
    if core.share < MIN_SHARE:
        return f"{share} (expected: {MIN_SHARE:.0%}): something else runs there"
    return ", all of its time: a slow core, a hot one, or another model"


def _faster_timing() -> tuple[float, float]:
    """Return the result of `_compute`, of the better of two tries if the core was shared."""
    first = _compute()
    return first if first[1] >= MIN_SHARE else max(first, _compute(), key=lambda timing: timing[1])


def _compute() -> tuple[float, float]:
    x, y = np.zeros(LENGTH // 2), np.ones(LENGTH // 2)
    np.add(x, y, out=x)  # now on that core, and in its cache
    start, cpu_start = time.perf_counter(), time.thread_time()
    for _ in range(CALLS):
        np.add(x, y, out=x)
    seconds = time.perf_counter() - start
    return seconds, (time.thread_time() - cpu_start) / seconds
