"""The sweep of `hpctrain tune`: all all-reduces over sizes, in node memory and outside of it.

    round   4 B              8 B              ...    64 MiB
    1..3    A B C D E F      A B C D E F             A B C D E F
    4       A B . D . .      A . . D . .             . . C D . .     twice as slow as the best: out
    5       A B . D . .      A . . D . .             . . C D . .
    ...
            2 KiB: A         3 KiB: A or C?          4 KiB: C     then once more between two choices

Algorithms take turns at a size, and rounds go over all sizes: other load on the machine hits all
algorithms alike, and each of them in few rounds. No round starts without enough time left. All
ranks make the same decisions, from the time of the slowest.

Where the fastest differs between two neighbouring sizes, their middle is measured as well, with the
algorithms still running at both: the time of an MPI's own jumps where its protocol changes (at
4 KiB, say), and interpolation between two sizes would put the threshold far below the jump.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from time import perf_counter
from types import ModuleType

import numpy as np

from hpctrain.collectives import ALLREDUCE, Group, all_gather_short
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array
from hpctrain.tuning import choose, select
from hpctrain.tuning.choose import AlgorithmTime, Buckets
from hpctrain.tuning.measure import timed

#: Bytes reduced between two readings of the clock, in as many calls, but 32 at most.
BATCH_BYTES, MOST_CALLS = 1 << 20, 32
MIN_ROUNDS = 3  #: before an algorithm is dropped: one slow round may be due to another process
DROP_RATIO = 2.0  #: times the fastest: dropped
REFINEMENT_SHARE = 0.2  #: of the time is reserved for the sizes between two choices
BUCKET_BYTES = [1 << i for i in range(16, 27)]
#: A plane is too long for the caches, so each bucket comes from memory.
PLANE_BYTES = 64 << 20


@dataclass
class TimeLimit:
    """The time limit of a measurement, the same on all ranks."""

    group: Group
    limit_s: float
    start: float = field(default_factory=lambda: perf_counter())

    def remaining(self) -> float:
        """Return the remaining seconds; collective."""
        elapsed_s = np.array([perf_counter() - self.start])
        elapsed_of_all = all_gather_short(self.group.link, elapsed_s.view(np.uint8)).view(
            np.float64
        )
        return float(self.limit_s - elapsed_of_all.max())


@dataclass(frozen=True)
class Arrays:
    """Operands: float32 zeros, so that no sum overflows, as long as the longest size."""

    private_array: Array
    in_node_memory: Array | None  #: in node memory; None if there is none

    @property
    def kinds(self) -> list[tuple[bool, Array]]:
        """(in memory?, array)."""
        return [(False, self.private_array)] + (
            [] if self.in_node_memory is None else [(True, self.in_node_memory)]
        )


def arrays(group: Group, nbytes: int, xp: ModuleType = np) -> Arrays:
    """Return arrays of `nbytes`, of NumPy or CuPy; collective."""
    private_array, shared = xp.empty(-(-nbytes // 4), np.float32), None
    private_array.fill(0)  # untouched pages all map to one page of zeros
    memory = group.memory
    if memory is not None and (memory.kind if xp is np else memory.gpu) is not None:
        shared = memory.zeros_like(private_array)
        shared = shared if memory.locate(shared) else None  # sharing failed
    return Arrays(private_array, shared)


def applicable(group: Group, xp: ModuleType = np) -> list[str]:
    """Return the names of the algorithms that support the layout of `group`; collective."""
    excluded = [*choose.NEVER_CHOSEN]
    excluded += ["hierarchical"] if len(group.nodes) < 2 else []  # equals `direct` there
    excluded += [] if xp is np else ["native"]  # reduces on the host
    names = []
    for name, function in ALLREDUCE.items():
        if name in excluded:
            continue
        try:
            function(group, xp.zeros(1, np.float32), np.add)
        except UsageError:  # on all ranks alike: it depends on the layout
            continue
        names.append(name)
    return names


def sweep(
    group: Group, sizes: Sequence[int], rounds: int, limit_s: float, xp: ModuleType = np
) -> Iterator[list[AlgorithmTime]]:
    """Yield, after each round, the rows of all rounds so far, of arrays of `xp`; collective.

    At most `rounds`, as many as `limit_s` seconds allow, at least three; then as many at the sizes
    between two choices.
    """
    names, operands = applicable(group, xp), arrays(group, max(sizes), xp)
    limit = TimeLimit(group, limit_s)
    cells = [
        Candidates(group, nbytes, in_memory, x[: -(-nbytes // 4)], names)
        for nbytes in sizes
        for in_memory, x in operands.kinds
    ]
    count = 0
    for count in _rounds(cells, rounds, limit, REFINEMENT_SHARE * limit_s):  # noqa: B007
        yield _rows(cells)
    middles = [
        candidates
        for in_memory, x in operands.kinds
        for candidates in _middle_sizes(group, x, [c for c in cells if c.in_memory == in_memory])
    ]
    for _ in _rounds(middles, count if middles else 0, limit, 0.0):
        yield _rows([*cells, *middles])


def _rounds(
    cells: Sequence[Candidates], rounds: int, limit: TimeLimit, spare_s: float
) -> Iterator[int]:
    """Measure in rounds and yield their number while more than `spare_s` seconds remain."""
    for count in range(1, rounds + 1):
        remaining_before = limit.remaining()
        for candidates in cells:
            candidates.measure()
        yield count
        remaining = limit.remaining()
        if count >= MIN_ROUNDS:
            for candidates in cells:
                candidates.drop()
            if (
                remaining - spare_s < remaining_before - remaining
            ):  # the next round may take as long
                return


def _rows(cells: Iterable[Candidates]) -> list[AlgorithmTime]:
    return [row for candidates in cells for row in candidates.rows]


def _middle_sizes(group: Group, x: Array, cells: Sequence[Candidates]) -> Iterator[Candidates]:
    """Yield the middle of each two neighbours in `cells`, of one kind, with different choices.

    In whole elements of `x`. Collective: names in one order on all ranks.
    """
    candidates_by_size = {candidates.bytes: candidates for candidates in cells}
    for a, b, names_chosen in choose.changes(_rows(cells)):
        middle = (a + b) // 2 // x.itemsize * x.itemsize
        if a < middle:
            names = sorted(
                names_chosen | (candidates_by_size[a].running & candidates_by_size[b].running)
            )
            yield Candidates(
                group, middle, candidates_by_size[a].in_memory, x[: middle // x.itemsize], names
            )


class Candidates:
    """The algorithms at one size and kind of array, and their times so far."""

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
        """Time each running algorithm once; collective."""
        order = sorted(self._running)
        self._order.shuffle(order)  # the caches hold the predecessor's data: vary it
        for name in order:
            call = self._running[name]
            if self._batch == 1 or not self._seconds[name]:
                call()  # warm the cache; the first call allocates scratch and connects
            self._seconds[name].append(timed(self._link, call, self._batch, self._x))

    def drop(self) -> None:
        """Drop the algorithms whose best time is slow."""
        slow_candidates = slower(self._seconds, DROP_RATIO)
        self._running = {
            name: call for name, call in self._running.items() if name not in slow_candidates
        }

    @property
    def running(self) -> set[str]:
        """The names of the algorithms not dropped."""
        return set(self._running)

    @property
    def rows(self) -> list[AlgorithmTime]:
        """The medians so far; for a dropped algorithm the fastest's median times its slowdown.

        Its own median is one of earlier rounds: since then the machine may have become slower.
        """
        medians_s = {name: float(np.median(self._seconds[name])) for name in self._running}
        fastest = min(medians_s, key=medians_s.__getitem__)
        shortest = min(self._seconds[fastest])
        medians = {
            name: medians_s.get(name) or medians_s[fastest] * min(times) / shortest
            for name, times in self._seconds.items()
        }
        return [
            AlgorithmTime(name, self.in_memory, self.bytes, s, self._spread(name))
            for name, s in medians.items()
        ]

    def _spread(self, name: str) -> float | None:
        """Return the spread of a running algorithm's times, quartiles over median; else None."""
        if name not in self._running:
            return None
        quartile_25, median, high = np.percentile(self._seconds[name], [25, 50, 75]).tolist()
        return float((high - quartile_25) / median)


def slower(times: Mapping[str, Sequence[float]], factor: float) -> set[str]:
    """Return the names whose best time is more than `factor` times that of the fastest."""
    shortest = {name: min(seconds) for name, seconds in times.items()}
    return {name for name, seconds in shortest.items() if seconds > factor * min(shortest.values())}


def buckets(
    group: Group, rows: Sequence[AlgorithmTime], max_bytes: int, rounds: int, xp: ModuleType = np
) -> Buckets:
    """Return the seconds per byte of several bucket lengths, with the fastest of `rows`.

    A whole plane is reduced, bucket after bucket, as in training: no bucket is in the cache from
    the last call. Collective.
    """
    chosen = replace(group, choices=choose.choices(choose.plan(rows, (), measured=True)))
    plane = arrays(group, min(max_bytes, PLANE_BYTES), xp).kinds[-1][1]
    lengths = [n for n in BUCKET_BYTES if n <= plane.nbytes] or [plane.nbytes]
    reducers = {n: _bucket_reducer(chosen, plane, n // 4) for n in lengths}
    seconds: dict[int, list[float]] = {n: [] for n in lengths}
    for _ in range(rounds):
        for n, reduce_buckets in reducers.items():
            seconds[n].append(timed(group.link, reduce_buckets, memory=plane))
    return tuple((n, float(np.median(times)) / plane.nbytes) for n, times in seconds.items())


def _bucket_reducer(group: Group, plane: Array, length: int) -> Callable[[], None]:
    """Return a call that reduces `plane` in slices of `length` elements."""
    slices = [plane[start : start + length] for start in range(0, plane.size, length)]
    calls = [select.bound(group, x, np.add) for x in slices]

    def reduce_buckets() -> None:
        for call in calls:
            call()

    return reduce_buckets


def bytes_needed(max_bytes: int) -> int:
    """Return the bytes that a rank needs for sizes up to `max_bytes`: two arrays and a plane."""
    return 2 * max_bytes + min(max_bytes, PLANE_BYTES)
