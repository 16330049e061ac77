"""A short computation on every core: one that is slow, or that somebody else uses, delays all.

Cores are dealt to the ranks that may run on them, each to one rank; on every node they are tried
one after the other by each rank, and side by side by its ranks, as training will use them. A core
that is shared with other work shows it: the time that the thread was given is less than has passed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.doctor.check import Check
from hpctrain.doctor.job.outliers import usual
from hpctrain.hardware.pci import core_list
from hpctrain.transport.bind import on_core
from hpctrain.transport.seats import Seated

LENGTH, CALLS = 4096, 60_000  # 32 KiB in all, in the first cache; some 30 ms
ALONE = 0.9  # the share of its time that a thread gets on a core of its own


@dataclass(frozen=True)
class Core:
    """How long the computation took on one core, and which share of that time it was given."""

    rank: int
    host: str
    core: int
    seconds: float
    share: float


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
    found = []
    for core in cores:
        try:
            with on_core(core):
                found.append(Core(rank, host, core, *_computed()))
        except OSError:  # taken away since
            continue
    return found


def check(found: Sequence[Core]) -> Check:
    """Return what is to be said of all cores."""
    if not found:
        return Check("speed of cores", "note", "none could be tried")
    is_usual = usual([one.seconds for one in found])
    seen = f"{len(found)} cores, median {is_usual.median * 1e3:.1f} ms for a short computation"
    slow = sorted((c for c in found if c.seconds > is_usual.limit), key=lambda c: -c.seconds)
    if not slow:
        return Check("speed of cores", "ok", seen)
    words = [f"core {c.core} of {c.host} (rank {c.rank}): {is_usual.times(c.seconds)}{_why(c)}"
             for c in slow[:4]]  # fmt: skip
    seen += f", MAD {is_usual.mad * 1e3:.1f}; {'; '.join(words)}"
    seen += f"; and {len(slow) - 4} more" * (len(slow) > 4)
    one = slow[0]
    remedy = (
        f"look who runs there (on {one.host}: ps -eLo psr,pcpu,pid,user,comm | awk '$1 == "
        f"{one.core}'), ask for whole nodes (srun --exclusive), or leave the node out"
    )
    return Check("speed of cores", "slow", seen, remedy, tuple(dict.fromkeys(c.host for c in slow)))


def _why(core: Core) -> str:
    if core.share < ALONE:
        return f", given {core.share:.0%} of its time: something else runs there"
    return ", all of its time: a slow core, a hot one, or another model"


def _computed() -> tuple[float, float]:
    x, y = np.zeros(LENGTH // 2), np.ones(LENGTH // 2)
    np.add(x, y, out=x)  # now on that core, and in its cache
    start, given = time.perf_counter(), time.thread_time()
    for _ in range(CALLS):
        np.add(x, y, out=x)
    seconds = time.perf_counter() - start
    return seconds, (time.thread_time() - given) / seconds
