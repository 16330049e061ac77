"""The sweep of `hpctrain tune`: all all-reduces over sizes, inside and outside node memory.

    round   4 B              8 B              ...    64 MiB
    1..3    A B C D E F      A B C D E F             A B C D E F
    4       A B . D . .      A . . D . .             . . C D . .     twice as slow as the best: out
    5       A B . D . .      A . . D . .             . . C D . .
    ...
            2 KiB: A         3 KiB: A or C?          4 KiB: C     then once more between two choices

Algorithms take turns at a size, and rounds go over all sizes: other load on the machine hits all
algorithms alike, and an algorithm in few rounds. No round starts without enough time left. All
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
from hpctrain.tuning.choose import AlgorithmTime, BucketCosts
from hpctrain.tuning.measure import time_calls

#: Bytes reduced between two readings of the clock, in as many calls, but 32 at most.
BATCH_BYTES, MAX_CALLS = 1 << 20, 32
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
class Operands:
    """Operands: float32 zeros, so that no sum overflows, as long as the longest size."""

    private_array: Array
    node_memory_array: Array | None  #: in node memory; None if there is none

    @property
    def arrays_by_kind(self) -> list[tuple[bool, Array]]:
        """(in memory?, array)."""
        return [(False, self.private_array)] + (
            [] if self.node_memory_array is None else [(True, self.node_memory_array)]
        )


def make_operands(group: Group, nbytes: int, xp: ModuleType = np) -> Operands:
    """Return arrays of `nbytes`, of NumPy or CuPy; collective."""
    private_array, node_memory_array = xp.empty(-(-nbytes // 4), np.float32), None
    private_array.fill(0)  # untouched pages all map to one page of zeros
    memory = group.memory
    if memory is not None and (memory.kind if xp is np else memory.gpu) is not None:
        node_memory_array = memory.zeros_like(private_array)
        node_memory_array = (
            node_memory_array if memory.locate(node_memory_array) else None
        )  # sharing failed
    return Operands(private_array, node_memory_array)


def applicable_algorithms(group: Group, xp: ModuleType = np) -> list[str]:
    """Return the names of the algorithms that support the layout of `group`; collective."""
    excluded_names = [*choose.NEVER_CHOSEN]
    excluded_names += ["hierarchical"] if len(group.nodes) < 2 else []  # equals `direct` there
    excluded_names += [] if xp is np else ["native"]  # reduces on the host
    names = []
    for name, function in ALLREDUCE.items():
        if name in excluded_names:
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
    names, operands = applicable_algorithms(group, xp), make_operands(group, max(sizes), xp)
    limit = TimeLimit(group, limit_s)
    candidate_sets = [
        Candidates(group, nbytes, in_memory, x[: -(-nbytes // 4)], names)
        for nbytes in sizes
        for in_memory, x in operands.arrays_by_kind
    ]
    count = 0
    for count in _measure_rounds(candidate_sets, rounds, limit, REFINEMENT_SHARE * limit_s):  # noqa: B007
        yield _collect_rows(candidate_sets)
    middle_sets = [
        candidates
        for in_memory, x in operands.arrays_by_kind
        for candidates in _middle_sizes(
            group, x, [c for c in candidate_sets if c.in_memory == in_memory]
        )
    ]
    for _ in _measure_rounds(middle_sets, count if middle_sets else 0, limit, 0.0):
        yield _collect_rows([*candidate_sets, *middle_sets])


def _measure_rounds(
    candidate_sets: Sequence[Candidates], rounds: int, limit: TimeLimit, spare_s: float
) -> Iterator[int]:
    """Measure in rounds and yield their number while more than `spare_s` seconds remain."""
    for count in range(1, rounds + 1):
        remaining_before = limit.remaining()
        for candidates in candidate_sets:
            candidates.measure()
        yield count
        remaining = limit.remaining()
        if count >= MIN_ROUNDS:
            for candidates in candidate_sets:
                candidates.drop_slow()
            if (
                remaining - spare_s < remaining_before - remaining
            ):  # the next round may take as long
                return


def _collect_rows(candidate_sets: Iterable[Candidates]) -> list[AlgorithmTime]:
    return [row for candidates in candidate_sets for row in candidates.rows]


def _middle_sizes(
    group: Group, x: Array, candidate_sets: Sequence[Candidates]
) -> Iterator[Candidates]:
    """Yield the middle of two neighbours in `candidate_sets`, of one kind, whose choices differ.

    In whole elements of `x`. Collective: names in one order on all ranks.
    """
    candidates_by_size = {candidates.bytes: candidates for candidates in candidate_sets}
    for a, b, names_chosen in choose.find_changes(_collect_rows(candidate_sets)):
        middle_bytes = (a + b) // 2 // x.itemsize * x.itemsize
        if a < middle_bytes:
            names = sorted(
                names_chosen
                | (candidates_by_size[a].running_names & candidates_by_size[b].running_names)
            )
            yield Candidates(
                group,
                middle_bytes,
                candidates_by_size[a].in_memory,
                x[: middle_bytes // x.itemsize],
                names,
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
        self._calls_per_batch = max(1, min(MAX_CALLS, BATCH_BYTES // x.nbytes))
        self._running_calls = {
            name: select.bind(group, x, np.add, select.find_allreduce(name)) for name in names
        }
        self._seconds: dict[str, list[float]] = {name: [] for name in self._running_calls}
        self._order = Random(nbytes)  # the same on all ranks

    def measure(self) -> None:
        """Time each running algorithm once; collective."""
        order = sorted(self._running_calls)
        self._order.shuffle(order)  # the caches hold the predecessor's data: vary it
        for name in order:
            call = self._running_calls[name]
            if self._calls_per_batch == 1 or not self._seconds[name]:
                call()  # warm the cache; the first call allocates scratch and connects
            self._seconds[name].append(time_calls(self._link, call, self._calls_per_batch, self._x))

    def drop_slow(self) -> None:
        """Drop the algorithms whose best time is slow."""
        slow_names = find_slower(self._seconds, DROP_RATIO)
        self._running_calls = {
            name: call for name, call in self._running_calls.items() if name not in slow_names
        }

    @property
    def running_names(self) -> set[str]:
        """The names of the algorithms not dropped."""
        return set(self._running_calls)

    @property
    def rows(self) -> list[AlgorithmTime]:
        """The medians so far; for a dropped algorithm the fastest's median times its slowdown.

        Its own median belongs to earlier rounds: since then the machine may have become slower.
        """
        medians_s = {name: float(np.median(self._seconds[name])) for name in self._running_calls}
        fastest = min(medians_s, key=medians_s.__getitem__)
        shortest_s = min(self._seconds[fastest])
        medians = {
            name: medians_s.get(name) or medians_s[fastest] * min(times) / shortest_s
            for name, times in self._seconds.items()
        }
        return [
            AlgorithmTime(name, self.in_memory, self.bytes, s, self._relative_spread(name))
            for name, s in medians.items()
        ]

    def _relative_spread(self, name: str) -> float | None:
        """Return the spread of a running algorithm's times, quartiles over median; else None."""
        if name not in self._running_calls:
            return None
        quartile_25, median, quartile_75 = np.percentile(self._seconds[name], [25, 50, 75]).tolist()
        return float((quartile_75 - quartile_25) / median)


def find_slower(seconds_by_name: Mapping[str, Sequence[float]], factor: float) -> set[str]:
    """Return the names whose best time is more than `factor` times the fastest best time."""
    shortest_s = {name: min(seconds) for name, seconds in seconds_by_name.items()}
    return {
        name for name, seconds in shortest_s.items() if seconds > factor * min(shortest_s.values())
    }


def measure_buckets(
    group: Group, rows: Sequence[AlgorithmTime], max_bytes: int, rounds: int, xp: ModuleType = np
) -> BucketCosts:
    """Return the seconds per byte of several bucket lengths, with the fastest of `rows`.

    A whole plane is reduced, bucket after bucket, as in training: no bucket is in the cache from
    the last call. Collective.
    """
    tuned_group = replace(
        group, choices=choose.make_choices(choose.make_plan(rows, (), measured=True))
    )
    plane = make_operands(group, min(max_bytes, PLANE_BYTES), xp).arrays_by_kind[-1][1]
    lengths = [n for n in BUCKET_BYTES if n <= plane.nbytes] or [plane.nbytes]
    reducers = {n: _bucket_reducer(tuned_group, plane, n // 4) for n in lengths}
    seconds: dict[int, list[float]] = {n: [] for n in lengths}
    for _ in range(rounds):
        for n, reduce_buckets in reducers.items():
            seconds[n].append(time_calls(group.link, reduce_buckets, memory=plane))
    return tuple((n, float(np.median(times)) / plane.nbytes) for n, times in seconds.items())


def _bucket_reducer(group: Group, plane: Array, length: int) -> Callable[[], None]:
    """Return a call that reduces `plane` in slices of `length` elements."""
    slices = [plane[start : start + length] for start in range(0, plane.size, length)]
    calls = [
        select.bind(group, x, np.add, select.choose_algorithm(group, x, np.add)) for x in slices
    ]

    def reduce_buckets() -> None:
        for call in calls:
            call()

    return reduce_buckets


def bytes_needed(max_bytes: int) -> int:
    """Return the bytes that a rank needs for sizes up to `max_bytes`: two arrays and a plane."""
    return 2 * max_bytes + min(max_bytes, PLANE_BYTES)
