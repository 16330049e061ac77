"""A short computation on every core: one that is slow, or that somebody else uses, delays all.

Cores are dealt to the ranks that may run on them, each to one rank; on every node they are tried
one after the other by each rank, and side by side by its ranks, as training will use them. A core
that is shared with other work shows it: the time that the thread was given is less than has passed.
That share is judged by itself, not by the median: on a busy node all cores are alike.

Cost: some 30 ms for each core that a rank may use and no other rank tries, at most 4 s for one rank
on 128 cores, twice that on cores that are busy; what is told grows as the cores of the job.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.doctor.check import Check
from hpctrain.doctor.job.outliers import usual
from hpctrain.doctor.node import MORE_TIME
from hpctrain.hardware import quota
from hpctrain.hardware.pci import core_list
from hpctrain.transport.bind import on_core
from hpctrain.transport.seats import FEWER, Seated

LENGTH, CALLS = 4096, 60_000  # 32 KiB in all, in the first cache; some 30 ms
#: The share of its time that a thread gets at least on a core of its own. One that has to share
#: with another thread gets half; a daemon that wakes up once leaves seven eighths of 30 ms.
ALONE = 0.8


@dataclass(frozen=True)
class Core:
    """How long the computation took on one core, and which share of that time it was given."""

    rank: int
    host: str
    core: int
    seconds: float
    share: float
    quota: float | None = None  #: of so many cores its rank is given the time; None: of all


def dealt(seats: Sequence[Seated], machines: Sequence[str]) -> list[list[int]]:
    """Return the cores that each rank is to try: each of a machine once, as evenly as may be."""
    out: list[list[int]] = [[] for _ in seats]
    for machine in dict.fromkeys(machines):
        ranks = [rank for rank, one in enumerate(machines) if one == machine]
        may = {rank: set(core_list(seats[rank].cores)) for rank in ranks}
        for core in sorted(set().union(*may.values())):
            able = [rank for rank in ranks if core in may[rank]]
            out[min(able, key=lambda rank: len(out[rank]))].append(core)
    return out


def tried(rank: int, host: str, cores: Iterable[int]) -> list[Core]:
    """Return how fast each of `cores` is, as far as they can be had."""
    found, given = [], quota.cores()
    for core in cores:
        try:
            with on_core(core):
                found.append(Core(rank, host, core, *_quietest(), given))
        except OSError:  # taken away since
            continue
    return found


def check(found: Sequence[Core]) -> Check:
    """Return what is to be said of all cores."""
    if not found:
        return Check("speed of cores", "note", "none could be tried")
    is_usual = usual([one.seconds for one in found])
    seen = f"{len(found)} cores, median {is_usual.median * 1e3:.1f} ms for a short computation"
    slow = [c for c in found if c.seconds > is_usual.limit or c.share < ALONE]
    slow.sort(key=lambda c: -c.seconds)
    if not slow:
        least = min(1.0, *(c.share for c in found))
        return Check("speed of cores", "ok", f"{seen}, given {least:.0%} of their time or more")
    words = [f"core {c.core} of {c.host} (rank {c.rank}): {is_usual.times(c.seconds)}{_why(c)}"
             for c in slow[:4]]  # fmt: skip
    seen += f", MAD {is_usual.mad * 1e3:.1f}; {'; '.join(words)}"
    seen += f"; and {len(slow) - 4} more" * (len(slow) > 4)
    nodes = tuple(dict.fromkeys(c.host for c in slow))
    return Check("speed of cores", "slow", seen, _remedy(slow[0]), nodes)


def quotas(seats: Sequence[Seated], given: Mapping[str, float | None]) -> list[Check]:
    """Return the check of the CPU time that nodes are `given`; none where no quota limits it."""
    threads: Counter[str] = Counter()
    for seat in seats:
        threads[seat.host] += seat.blas_threads
    limits = {host: limit for host, limit in given.items() if limit is not None}
    over = {host: limit for host, limit in limits.items() if threads[host] > max(1, limit)}
    if not limits:
        return []
    host = min(over or limits, key=limits.__getitem__)
    seen = f"{threads[host]} BLAS threads on {host}, quota: the time of {limits[host]:g} cores"
    if not over:
        return [Check("CPU quota", "ok", seen)]
    seen += f"{f', and {len(over) - 1} nodes like it' * (len(over) > 1)}: they are stopped"
    return [Check("CPU quota", "bad", f"{seen} when it is used up", f"{FEWER}, or ask for more: "
                  f"{MORE_TIME}")]  # fmt: skip


def _remedy(core: Core) -> str:
    if _throttled(core):
        return f"ask for more CPU time ({MORE_TIME}), or start fewer ranks"
    return (
        f"look who runs there (on {core.host}: ps -eLo psr,pcpu,pid,user,comm | awk '$1 == "
        f"{core.core}'), ask for whole nodes (srun --exclusive), or leave the node out"
    )


def _throttled(core: Core) -> bool:
    return core.share < ALONE and core.quota is not None


def _why(core: Core) -> str:
    given = f", given {core.share:.0%} of its time"
    if _throttled(core):
        return f"{given}: a quota of {core.quota:g} cores"
    if core.share < ALONE:
        return f"{given} (expected: {ALONE:.0%}): something else runs there"
    return ", all of its time: a slow core, a hot one, or another model"


def _quietest() -> tuple[float, float]:
    """Return what `_computed` does, from the better of two tries where others took the core."""
    first = _computed()
    return first if first[1] >= ALONE else max(first, _computed(), key=lambda tried: tried[1])


def _computed() -> tuple[float, float]:
    x, y = np.zeros(LENGTH // 2), np.ones(LENGTH // 2)
    np.add(x, y, out=x)  # now on that core, and in its cache
    start, given = time.perf_counter(), time.thread_time()
    for _ in range(CALLS):
        np.add(x, y, out=x)
    seconds = time.perf_counter() - start
    return seconds, (time.thread_time() - given) / seconds
