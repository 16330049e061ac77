"""Times a collective over sizes: every contender on the same buffer, in turn, in one run.

For each size: the buffer is filled with random data, each contender is called once and checked
against float64; then all, and the floor, are timed on zeros (so that no sum overflows); then once
more with cold caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hpctrain.bench import roofline
from hpctrain.bench.measured_collectives import NATIVE, NATIVE_PLAIN, Case, Collective
from hpctrain.bench.rivals import Rival
from hpctrain.collectives import all_gather_bytes, operation
from hpctrain.tuning.measure import COLD_BYTES, ContextFactory, interleaved, paired_ratio, spread
from hpctrain.tuning.select import auto, name_of
from hpctrain.user_collectives.calls import allreduce
from hpctrain.world import World

FLOOR = "floor"
BATCH_BYTES, MOST_CALLS = 1 << 20, 64
RIVALS_FIRST = 2  # calls of a rival that was asleep, before those that count
Row = dict[str, Any]


@dataclass(frozen=True)
class SweepPlan:
    """The contenders, sizes and rounds of a measurement."""

    collective: Collective
    sizes: Sequence[int]
    algorithms: Sequence[str]
    dtype: np.dtype
    op: str = "sum"
    rounds: int = 20
    warm_up: int = 3
    in_node_memory: bool = True  #: whether buffers lie in node memory, as gradients do


@dataclass(frozen=True)
class CollectiveContender:
    """A collective call, and the array that holds its result.

    Where the call returns an array, the result is there instead.
    """

    call: Callable[[], Any]
    result: np.ndarray
    awake: ContextFactory = nullcontext  #: context manager around the calls
    first_calls: int = 1  #: before those that count, in each turn

    @contextmanager
    def warmed_up(self) -> Iterator[None]:
        """Wake up and make the first calls, whose caches still hold another contender's data."""
        with self.awake():
            for _ in range(self.first_calls):
                self.call()
            yield


def calls_per_round(nbytes: int) -> int:
    """Return the calls between two readings of the clock: 64 up to 16 KiB, 1 from 1 MiB.

    A call of a microsecond is too short to time beside a barrier; OSU's benchmarks loop, too.
    """
    return max(1, min(MOST_CALLS, BATCH_BYTES // max(1, nbytes)))


def run(world: World, plan: SweepPlan, rivals: Mapping[str, Rival]) -> Iterator[list[Row]]:
    """Yield the rows of all contenders for each size; collective."""
    lengths = _lengths(plan, world.size)
    make = world.memory.zeros if plan.in_node_memory else _private
    buffer = make(lengths[-1], plan.dtype)
    for length in lengths:
        yield _rows(world, plan, rivals, buffer[:length])


def contenders(
    world: World, plan: SweepPlan, rivals: Mapping[str, Rival], x: np.ndarray
) -> dict[str, CollectiveContender]:
    """Return the contenders for flat `x`, by name."""
    by_name: dict[str, CollectiveContender] = {}
    name, op = plan.collective.name, operation(plan.op, plan.dtype)
    for algorithm in plan.algorithms:
        if algorithm == NATIVE:
            by_name[algorithm] = CollectiveContender(*world.link.native.bind(name, x, op))
        elif algorithm == NATIVE_PLAIN:
            by_name[algorithm] = CollectiveContender(
                *world.link.native.bind(f"{name} plain", x, op)
            )
        elif algorithm in plan.collective.public_calls:  # `ht.allreduce` itself
            check = plan.collective.public_calls[algorithm]
            by_name[algorithm] = CollectiveContender(_typed(x, plan.op, world, check), x)
        elif bind := plan.collective.bound.get(algorithm):
            by_name[algorithm] = CollectiveContender(bind(world.main, x, op), x)
        else:
            call = partial(plan.collective.algorithms[algorithm], world.main, x, op)
            by_name[algorithm] = CollectiveContender(call, x)
    for rival, library in rivals.items():
        by_name[rival] = CollectiveContender(
            library.call(name, x, plan.op), x, library.awake, RIVALS_FIRST
        )
    return by_name


def judge(
    world: World, plan: SweepPlan, contender: CollectiveContender, x: np.ndarray
) -> tuple[bool, bool]:
    """Return whether `contender` is right on all ranks, and whether these share its result.

    Collective; fills `x` with random data.
    """
    case = Case(world.rank, world.size, x.size, plan.dtype, plan.op)
    plan.collective.prepare(x, case)
    world.link.barrier()  # neighbours' memory must be filled before it is read
    with contender.awake():
        returned = contender.call()
    result = contender.result if returned is None else returned
    is_right = plan.collective.is_correct(result, case)
    is_other_array = not np.shares_memory(result, x)
    verdicts = all_gather_bytes(world.link, bytes((is_right, is_other_array)))
    return all(is_right for is_right, _ in verdicts), any(
        is_other_array for _, is_other_array in verdicts
    )


def _lengths(plan: SweepPlan, ranks: int) -> list[int]:
    item = plan.dtype.itemsize
    return sorted({plan.collective.length(size, item, ranks) for size in plan.sizes})


def _private(length: int, dtype: np.dtype) -> np.ndarray:
    x = np.empty(length, dtype)
    x.fill(0)  # untouched pages all map to one page of zeros
    return x


def _rows(world: World, plan: SweepPlan, rivals: Mapping[str, Rival], x: np.ndarray) -> list[Row]:
    by_name = contenders(world, plan, rivals, x)
    verdicts = {name: judge(world, plan, contender, x) for name, contender in by_name.items()}
    x.fill(0)
    floor, calls = roofline.floor_of(world.main, x), calls_per_round(x.nbytes)
    timed_calls = {name: contender.call for name, contender in by_name.items()} | {
        FLOOR: floor.call
    }
    around = {name: contender.warmed_up for name, contender in by_name.items()}
    seconds = interleaved(world.link, timed_calls, plan.rounds, plan.warm_up, calls, around)
    streamed = float(np.median(seconds.pop(FLOOR)))
    cold_seconds = _measure_cold(world, plan, by_name, x)
    rows = []
    for name, times in seconds.items():
        row = _times(world, plan, name, x.nbytes, times) | {"cold_s": cold_seconds.get(name)}
        if NATIVE in seconds:
            row["times_native"] = paired_ratio(seconds[NATIVE], times)
        if name in plan.collective.public_calls:
            row["takes"] = name_of(auto, world.main, x)
        correct, shared = verdicts[name]
        row["result"] = "shared" if shared else "in place"
        row["floor"] = floor.kind
        row["floor_s"] = streamed * min_bytes_moved(world, plan, shared, x.nbytes) / floor.nbytes
        row["share_of_floor"] = row["floor_s"] / row["median_s"]
        rows.append(row | {"rounds": plan.rounds, "calls": calls, "correct": correct})
    return rows


def _measure_cold(
    world: World, plan: SweepPlan, by_name: Mapping[str, CollectiveContender], x: np.ndarray
) -> dict[str, float]:
    """Return the median seconds of calls with cold caches; none where `x` itself fills them."""
    if x.nbytes > COLD_BYTES:
        return {}
    timed_calls = {name: contender.call for name, contender in by_name.items()}
    around = {name: contender.warmed_up for name, contender in by_name.items()}
    other = np.zeros(COLD_BYTES // 4, np.float32)
    link, rounds = world.link, (plan.rounds, plan.warm_up)
    seconds = interleaved(link, timed_calls, *rounds, contexts=around, evicting=other)
    return {name: float(np.median(times)) for name, times in seconds.items()}


def _typed(x: np.ndarray, op: str, world: World, check: bool) -> Callable[[], None]:
    """Return a call of `ht.allreduce`."""
    return lambda: allreduce(x, op, world=world, check=check)


def min_bytes_moved(world: World, plan: SweepPlan, shared: bool, nbytes: int) -> float:
    """Return the fewest bytes to move: in the memory of one node, or out of each of several."""
    collective, nodes = plan.collective, len(world.main.nodes)
    if nodes > 1:
        return nbytes * collective.busbw(nodes)
    traffic = collective.shared_traffic if shared else None
    return nbytes * (traffic or collective.traffic)(world.size)


def _times(world: World, plan: SweepPlan, name: str, nbytes: int, times: Sequence[float]) -> Row:
    statistics = spread(times)
    algbw = nbytes / statistics["median_s"] / 1e9
    return {
        "operation": plan.collective.name,
        "algorithm": name,
        "bytes": nbytes,
        "ranks": world.size,
        "dtype": plan.dtype.name,
        "op": plan.op,
        **statistics,
        "algbw": algbw,
        "busbw": algbw * plan.collective.busbw(world.size),
    }
