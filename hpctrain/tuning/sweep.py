"""Every all-reduce over sizes, arrays in node memory and plain ones: what `hpctrain tune` runs.

    round   4 B              8 B              ...    64 MiB
    1..3    A B C D E F      A B C D E F             A B C D E F
    4       A B . D . .      A . . D . .             . . C D . .     twice as slow as the best: out
    5       A B . D . .      A . . D . .             . . C D . .
    ...
            2 KiB: A         3 KiB: A or C?          4 KiB: C     then once more between two picks

Rivals take turns at a size, and rounds go over all sizes: whatever else keeps the machine busy for
a while hits all rivals alike, and of each of them one round in many. No round is begun that the
time would not suffice for. Every rank decides alike: all know the slowest's time.

Where two neighbouring sizes have different picks, their middle is measured as well, by those still
in the race at both: an MPI's own jumps where its protocol changes (at 4 KiB, say), and a straight
line between two sizes would let the step lie far below the jump.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from time import perf_counter
from types import ModuleType

import numpy as np

from hpctrain.collectives import ALLREDUCE, Group, all_gather_short
from hpctrain.errors import UsageError
from hpctrain.tuning import choose, select
from hpctrain.tuning.choose import Buckets, Row
from hpctrain.tuning.measure import timed
from hpctrain.xp import Array

#: So many bytes are reduced between two looks at the clock, in as many calls, but 32 at most.
BATCH_BYTES, MOST_CALLS = 1 << 20, 32
LEAST_ROUNDS = 3  #: before anybody leaves: one slow round may be another process's
SLOW = 2.0  #: times the best: leaves
AGAIN = 0.2  #: of the time is kept for the sizes between two picks
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

    plain: Array
    kept: Array | None  #: in memory that neighbours see; None where there is none

    @property
    def kinds(self) -> list[tuple[bool, Array]]:
        """(in memory?, array)."""
        return [(False, self.plain)] + ([] if self.kept is None else [(True, self.kept)])


def arrays(group: Group, nbytes: int, xp: ModuleType = np) -> Arrays:
    """Return arrays of `nbytes`, of NumPy or CuPy; collective."""
    plain, kept = xp.empty(-(-nbytes // 4), np.float32), None
    plain.fill(0)  # pages that were never written are all one page of zeros
    memory = group.memory
    if memory is not None and (memory.kind if xp is np else memory.gpu) is not None:
        kept = memory.zeros_like(plain)
        kept = kept if memory.place(kept) else None  # nothing could be shared after all
    return Arrays(plain, kept)


def able(group: Group, xp: ModuleType = np) -> list[str]:
    """Return the names of those that reduce in `group`; some refuse some layouts; collective."""
    not_these = [*choose.NEVER]
    not_these += ["hierarchical"] if len(group.nodes) < 2 else []  # as `direct` there
    not_these += [] if xp is np else ["native"]  # by way of the host
    found = []
    for name, function in ALLREDUCE.items():
        if name in not_these:
            continue
        try:
            function(group, xp.zeros(1, np.float32), np.add)
        except UsageError:  # on all ranks alike: it is said of the layout
            continue
        found.append(name)
    return found


def sweep(
    group: Group, sizes: Sequence[int], rounds: int, limit_s: float, xp: ModuleType = np
) -> Iterator[list[Row]]:
    """Yield, after each round, the rows of all rounds so far, of arrays of `xp`; collective.

    `rounds` at most, as many as `limit_s` seconds allow, three at least; then as many at the sizes
    between two picks.
    """
    names, given = able(group, xp), arrays(group, max(sizes), xp)
    clock = Clock(group, limit_s)
    places = [
        Place(group, nbytes, in_memory, x[: -(-nbytes // 4)], names)
        for nbytes in sizes
        for in_memory, x in given.kinds
    ]
    done = 0
    for done in _rounds(places, rounds, clock, AGAIN * limit_s):  # noqa: B007
        yield _rows(places)
    middles = [
        place
        for in_memory, x in given.kinds
        for place in _between(group, x, [one for one in places if one.in_memory == in_memory])
    ]
    for _ in _rounds(middles, done if middles else 0, clock, 0.0):
        yield _rows([*places, *middles])


def _rounds(places: Sequence[Place], rounds: int, clock: Clock, spare_s: float) -> Iterator[int]:
    """Measure in rounds and yield how many there were, while more than `spare_s` are left."""
    for done in range(1, rounds + 1):
        before = clock.left()
        for place in places:
            place.measure()
        yield done
        left = clock.left()
        if done >= LEAST_ROUNDS:
            for place in places:
                place.drop()
            if left - spare_s < before - left:  # another round might last as long
                return


def _rows(places: Iterable[Place]) -> list[Row]:
    return [row for place in places for row in place.rows]


def _between(group: Group, x: Array, places: Sequence[Place]) -> Iterator[Place]:
    """Yield a place in the middle of each two of `places`, of one kind, that differ in their pick.

    Of whole elements of `x`. Collective: names in one order on all ranks.
    """
    at = {place.bytes: place for place in places}
    for a, b, picks in choose.changes(_rows(places)):
        middle = (a + b) // 2 // x.itemsize * x.itemsize
        if a < middle:
            names = sorted(picks | (at[a].running & at[b].running))
            yield Place(group, middle, at[a].in_memory, x[: middle // x.itemsize], names)


class Place:
    """The rivals at one size and kind of array, and what they took so far."""

    def __init__(
        self,
        group: Group,
        nbytes: int,
        in_memory: bool,
        x: Array,
        names: Iterable[str],
    ):
        self._link, self._x, self.bytes, self.in_memory = group.link, x, nbytes, in_memory
        self._batch = max(1, min(MOST_CALLS, BATCH_BYTES // x.nbytes))
        self._running = {name: select.bound(group, x, np.add, name) for name in names}
        self._seconds: dict[str, list[float]] = {name: [] for name in self._running}
        self._order = Random(nbytes)  # the same on all ranks

    def measure(self) -> None:
        """Time each of those left once; collective."""
        order = sorted(self._running)
        self._order.shuffle(order)  # who runs before leaves caches behind: never the same
        for name in order:
            call = self._running[name]
            if self._batch == 1 or not self._seconds[name]:
                call()  # the array comes into the cache; at first scratch and connections are made
            self._seconds[name].append(timed(self._link, call, self._batch, self._x))

    def drop(self) -> None:
        """Let those leave that are slow at their best."""
        late = slower(self._seconds, SLOW)
        self._running = {name: call for name, call in self._running.items() if name not in late}

    @property
    def running(self) -> set[str]:
        """Who has not left."""
        return set(self._running)

    @property
    def rows(self) -> list[Row]:
        """The medians so far; of who has left, that of the fastest times how much slower it was.

        Its own median is one of earlier rounds: since then the machine may have become slower.
        """
        stayed = {name: float(np.median(self._seconds[name])) for name in self._running}
        fastest = min(stayed, key=stayed.__getitem__)
        best = min(self._seconds[fastest])
        medians = {
            name: stayed.get(name) or stayed[fastest] * min(taken) / best
            for name, taken in self._seconds.items()
        }
        return [
            Row(name, self.in_memory, self.bytes, s, self._spread(name))
            for name, s in medians.items()
        ]

    def _spread(self, name: str) -> float | None:
        """Return how far the repeats of one of those left lie apart."""
        if name not in self._running:
            return None
        low, median, high = np.percentile(self._seconds[name], [25, 50, 75]).tolist()
        return float((high - low) / median)


def slower(times: Mapping[str, Sequence[float]], factor: float) -> set[str]:
    """Return who takes more than `factor` times as long as the fastest, each at its best."""
    best = {name: min(seconds) for name, seconds in times.items()}
    return {name for name, seconds in best.items() if seconds > factor * min(best.values())}


def buckets(
    group: Group, rows: Sequence[Row], longest: int, rounds: int, xp: ModuleType = np
) -> Buckets:
    """Return what a byte costs in buckets of several lengths, by what `rows` tell to be fastest.

    A whole plane is reduced, bucket after bucket, as in training: no bucket finds the cache warm
    from the last call. Collective.
    """
    chosen = replace(group, choices=choose.choices(choose.plan(rows, (), measured=True)))
    plane = arrays(group, min(longest, PLANE_BYTES), xp).kinds[-1][1]
    lengths = [n for n in BUCKET_BYTES if n <= plane.nbytes] or [plane.nbytes]
    walks = {n: _walk(chosen, plane, n // 4) for n in lengths}
    seconds: dict[int, list[float]] = {n: [] for n in lengths}
    for _ in range(rounds):
        for n, walk in walks.items():
            seconds[n].append(timed(group.link, walk, on=plane))
    return tuple((n, float(np.median(taken)) / plane.nbytes) for n, taken in seconds.items())


def _walk(group: Group, plane: Array, length: int) -> Callable[[], None]:
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
