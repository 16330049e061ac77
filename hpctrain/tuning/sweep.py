"""Every all-reduce over sizes, arrays in node memory and plain ones: what `hpctrain tune` runs.

    size    rounds 1 .. 3                               4             5
    4 B     A B C D E F   A B C D E F   A B C D E F     A B . D . .   A B . D . .   ...
    8 B     A B C D E F   A B C D E F   A B C D E F     A . . D . .   ...
    4 MiB   A B . D E .   A B . D E .   ...                       twice as slow as the best: out

Rivals take turns, so that a busy second hits all of them. Whoever is hopeless leaves: after three
rounds for this size, and where lengths are such that only bandwidth counts, for all longer ones. A
round too many is not begun when the time is up. Every rank decides alike: all know the slowest's
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

import numpy as np

from hpctrain.collectives import ALLREDUCE, AllReduceFunction, Group, all_gather_short
from hpctrain.errors import UsageError
from hpctrain.tuning import choose, select
from hpctrain.tuning.choose import Buckets, Row
from hpctrain.tuning.measure import timed

#: So many bytes are reduced between two looks at the clock, in as many calls, but 32 at most.
BATCH_BYTES, MOST_CALLS = 1 << 20, 32
LEAST_ROUNDS = 3  #: before anybody leaves: one slow round may be another process's
SLOW, HOPELESS = 2.0, 4.0  #: times the best: leaves this size; leaves all longer ones
YARDSTICK = "native"  #: looked at for all lengths: people ask how much faster than it we are
BANDWIDTH_BYTES = 1 << 20  #: from here on time grows with the length: no latency hides any more
BUCKET_BYTES = [1 << i for i in range(16, 27)]
#: A plane is so long, that buckets do not find it in the cache.
PLANE_BYTES = 64 << 20


@dataclass
class Clock:
    """How long a measurement may last, the same on all ranks."""

    group: Group
    limit_s: float
    start: float = field(default_factory=lambda: perf_counter())

    def left(self) -> float:
        """Return the seconds that are left; collective."""
        spent = np.array([perf_counter() - self.start])
        everyones = all_gather_short(self.group.link, spent.view(np.uint8)).view(np.float64)
        return float(self.limit_s - everyones.max())


@dataclass(frozen=True)
class Arrays:
    """What is reduced: float32 zeros, so that no sum overflows, as long as the longest size."""

    plain: np.ndarray
    kept: np.ndarray | None  #: in node memory; None where there is none

    @property
    def kinds(self) -> list[tuple[bool, np.ndarray]]:
        """(in memory?, array)."""
        return [(False, self.plain)] + ([] if self.kept is None else [(True, self.kept)])


def arrays(group: Group, nbytes: int) -> Arrays:
    """Return arrays of `nbytes`; collective."""
    plain, kept = np.empty(-(-nbytes // 4), np.float32), None
    plain.fill(0)  # pages that were never written are all one page of zeros
    if group.memory is not None and group.memory.kind is not None:
        kept = group.memory.zeros(plain.size, np.float32)
        kept = kept if group.memory.place(kept) else None  # nothing could be shared after all
    return Arrays(plain, kept)


def able(group: Group) -> dict[str, AllReduceFunction]:
    """Return the algorithms that reduce in `group`; some refuse some layouts; collective."""
    found, same = {}, ("hierarchical",) if len(group.nodes) < 2 else ()  # as `direct` there
    for name, function in ALLREDUCE.items():
        if name in (*choose.NEVER, *same):
            continue
        try:
            function(group, np.zeros(1, np.float32), np.add)
        except UsageError:  # on all ranks alike: it is said of the layout
            continue
        found[name] = function
    return found


def sweep(group: Group, sizes: Sequence[int], rounds: int, limit_s: float) -> Iterator[list[Row]]:
    """Yield the rows of each size, ascending; collective.

    `rounds` at most, as many as `limit_s` seconds allow, three at least.
    """
    functions, given = able(group), arrays(group, max(sizes))
    clock, hopeless = Clock(group, limit_s), {kind: set[str]() for kind, _ in given.kinds}
    left = len(sizes) * len(given.kinds)
    for nbytes in sizes:
        rows = []
        for kind, x in given.kinds:
            rivals = {n: f for n, f in functions.items() if n not in hopeless[kind]}
            times = _one_size(group, rivals, x[: -(-nbytes // 4)], rounds, clock, left)
            rows += [Row(name, kind, nbytes, float(np.median(t))) for name, t in times.items()]
            if nbytes >= BANDWIDTH_BYTES:
                hopeless[kind] |= slower(times, HOPELESS) - {YARDSTICK}
            left -= 1
        yield rows


def slower(times: Mapping[str, Sequence[float]], factor: float) -> set[str]:
    """Return who takes more than `factor` times as long as the fastest, each at its best."""
    best = {name: min(seconds) for name, seconds in times.items()}
    return {name for name, seconds in best.items() if seconds > factor * min(best.values())}


def _one_size(
    group: Group,
    rivals: Mapping[str, AllReduceFunction],
    x: np.ndarray,
    rounds: int,
    clock: Clock,
    left: int,
) -> dict[str, list[float]]:
    """Return the seconds of each of `rivals` on `x`; `left` such calls share the time."""
    link, calls = group.link, max(1, min(MOST_CALLS, BATCH_BYTES // x.nbytes))
    until = clock.left() * (1 - 1 / left)
    running = {name: partial(function, group, x, np.add) for name, function in rivals.items()}
    for call in running.values():
        call()  # connections and scratch are made on first use
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for round_ in range(rounds):
        if round_ >= LEAST_ROUNDS:
            late = slower(seconds, SLOW)
            running = {name: call for name, call in running.items() if name not in late}
            if clock.left() < until:
                break
        for name, call in running.items():
            seconds[name].append(timed(link, call, calls))
    return seconds


def buckets(group: Group, rows: Sequence[Row], longest: int, rounds: int) -> Buckets:
    """Return what a byte costs in buckets of several lengths, by what `rows` tell to be fastest.

    A whole plane is reduced, bucket after bucket, as in training: no bucket finds the cache warm
    from the last call. Collective.
    """
    chosen = replace(group, choices=choose.choices(choose.plan(rows, (), measured=True)))
    plane = arrays(group, min(longest, PLANE_BYTES)).kinds[-1][1]
    lengths = [n for n in BUCKET_BYTES if n <= plane.nbytes] or [plane.nbytes]
    walks = {n: _walk(chosen, plane, n // 4) for n in lengths}
    seconds: dict[int, list[float]] = {n: [] for n in lengths}
    for _ in range(rounds):
        for n, walk in walks.items():
            seconds[n].append(timed(group.link, walk))
    return tuple((n, float(np.median(taken)) / plane.nbytes) for n, taken in seconds.items())


def _walk(group: Group, plane: np.ndarray, length: int) -> Callable[[], None]:
    """Return a call that reduces `plane` in slices of `length` elements."""
    slices = [plane[start : start + length] for start in range(0, plane.size, length)]
    calls = [select.bound(group, x, np.add) for x in slices]

    def walk() -> None:
        for call in calls:
            call()

    return walk


def bytes_needed(longest: int) -> int:
    """Return how much memory a rank needs for sizes up to `longest`: two arrays and a plane."""
    return 2 * longest + min(longest, PLANE_BYTES)
