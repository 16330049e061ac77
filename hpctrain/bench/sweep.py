"""Times a collective over sizes: every contender on the same buffer, in turn, in one run.

For each size: the buffer is filled with random data, each contender is called once and judged
against float64; then all are timed on zeros (so that no sum overflows), with the floor among them;
then once more with cold caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hpctrain.arrays import allreduce
from hpctrain.bench import floors
from hpctrain.bench.operations import NATIVE, NATIVE_PLAIN, Case, Collective
from hpctrain.bench.rivals import Rival
from hpctrain.collectives import all_gather_bytes, operation
from hpctrain.tuning.measure import COLD_BYTES, Around, interleaved, paired_ratio, spread
from hpctrain.tuning.select import auto, name_of
from hpctrain.world import World

FLOOR = "floor"
BATCH_BYTES, MOST_CALLS = 1 << 20, 64
RIVALS_FIRST = 2  # calls of a rival that was asleep, before those that count
Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is measured, and how often."""

    collective: Collective
    sizes: Sequence[int]
    algorithms: Sequence[str]
    dtype: np.dtype
    op: str = "sum"
    rounds: int = 20
    warm_up: int = 3
    in_node_memory: bool = True  #: whether buffers lie where neighbours see them, as gradients do


@dataclass(frozen=True)
class Contender:
    """A call that all ranks make together, and the array in which it leaves the result.

    Where the call returns an array, the result is there instead.
    """

    call: Callable[[], Any]
    result: np.ndarray
    awake: Around = nullcontext  #: what calls are made in
    first_calls: int = 1  #: before those that count, in each turn

    @contextmanager
    def warm(self) -> Iterator[None]:
        """Be awake, and past the first calls, which find in the caches what another has left."""
        with self.awake():
            for _ in range(self.first_calls):
                self.call()
            yield


def calls_per_round(nbytes: int) -> int:
    """Return how many calls are made between two looks at the clock: 64 up to 16 KiB, 1 from 1 MiB.

    A call of a microsecond cannot be told from the barrier before it; OSU's benchmarks loop, too.
    """
    return max(1, min(MOST_CALLS, BATCH_BYTES // max(1, nbytes)))


def run(world: World, plan: Plan, rivals: Mapping[str, Rival]) -> Iterator[list[Row]]:
    """Yield the rows of each size, those of all contenders; collective."""
    lengths = _lengths(plan, world.size)
    make = world.memory.zeros if plan.in_node_memory else _private
    buffer = make(lengths[-1], plan.dtype)
    for length in lengths:
        yield _rows(world, plan, rivals, buffer[:length])


def contenders(
    world: World, plan: Plan, rivals: Mapping[str, Rival], x: np.ndarray
) -> dict[str, Contender]:
    """Return who is measured on flat `x`, by name."""
    found: dict[str, Contender] = {}
    name, op = plan.collective.name, operation(plan.op, plan.dtype)
    for algorithm in plan.algorithms:
        if algorithm == NATIVE:
            found[algorithm] = Contender(*world.link.native_call(name, x, op))
        elif algorithm == NATIVE_PLAIN:
            found[algorithm] = Contender(*world.link.native_call(f"{name} plain", x, op))
        elif algorithm in plan.collective.typed:  # as people type it, too
            check = plan.collective.typed[algorithm]
            found[algorithm] = Contender(_typed(x, plan.op, world, check), x)
        elif bind := plan.collective.bound.get(algorithm):
            found[algorithm] = Contender(bind(world.main, x, op), x)
        else:
            call = partial(plan.collective.algorithms[algorithm], world.main, x, op)
            found[algorithm] = Contender(call, x)
    for rival, library in rivals.items():
        found[rival] = Contender(library.call(name, x, plan.op), x, library.awake, RIVALS_FIRST)
    return found


def judge(world: World, plan: Plan, one: Contender, x: np.ndarray) -> tuple[bool, bool]:
    """Return whether `one` is right on all ranks, and whether its result is one array for all.

    Collective; fills `x` with random data.
    """
    case = Case(world.rank, world.size, x.size, plan.dtype, plan.op)
    plan.collective.prepare(x, case)
    world.link.barrier()  # who reads neighbours' memory must find it filled
    with one.awake():
        returned = one.call()
    result = one.result if returned is None else returned
    right = plan.collective.right(result, case)
    elsewhere = not np.shares_memory(result, x)
    said = all_gather_bytes(world.link, bytes((right, elsewhere)))
    return all(right for right, _ in said), any(elsewhere for _, elsewhere in said)


def _lengths(plan: Plan, ranks: int) -> list[int]:
    item = plan.dtype.itemsize
    return sorted({plan.collective.length(size, item, ranks) for size in plan.sizes})


def _private(length: int, dtype: np.dtype) -> np.ndarray:
    x = np.empty(length, dtype)
    x.fill(0)  # pages that were never written are all one page of zeros
    return x


def _rows(world: World, plan: Plan, rivals: Mapping[str, Rival], x: np.ndarray) -> list[Row]:
    found = contenders(world, plan, rivals, x)
    verdicts = {name: judge(world, plan, one, x) for name, one in found.items()}
    x.fill(0)
    floor, calls = floors.of(world.main, x), calls_per_round(x.nbytes)
    timed = {name: one.call for name, one in found.items()} | {FLOOR: floor.call}
    around = {name: one.warm for name, one in found.items()}
    seconds = interleaved(world.link, timed, plan.rounds, plan.warm_up, calls, around)
    streamed = float(np.median(seconds.pop(FLOOR)))
    cold = _cold(world, plan, found, x)
    rows = []
    for name, taken in seconds.items():
        row = _times(world, plan, name, x.nbytes, taken) | {"cold_s": cold.get(name)}
        if NATIVE in seconds:
            row["times_native"] = paired_ratio(seconds[NATIVE], taken)
        if name in plan.collective.typed:
            row["takes"] = name_of(auto, world.main, x)
        correct, shared = verdicts[name]
        row["result"] = "shared" if shared else "in place"
        row["floor"] = floor.kind
        row["floor_s"] = streamed * least_bytes(world, plan, shared, x.nbytes) / floor.nbytes
        row["share_of_floor"] = row["floor_s"] / row["median_s"]
        rows.append(row | {"rounds": plan.rounds, "calls": calls, "correct": correct})
    return rows


def _cold(
    world: World, plan: Plan, found: Mapping[str, Contender], x: np.ndarray
) -> dict[str, float]:
    """Return the median seconds of calls with cold caches; none where `x` itself fills them."""
    if x.nbytes > COLD_BYTES:
        return {}
    timed = {name: one.call for name, one in found.items()}
    around = {name: one.warm for name, one in found.items()}
    other = np.zeros(COLD_BYTES // 4, np.float32)
    link, rounds = world.link, (plan.rounds, plan.warm_up)
    seconds = interleaved(link, timed, *rounds, around=around, other=other)
    return {name: float(np.median(taken)) for name, taken in seconds.items()}


def _typed(x: np.ndarray, op: str, world: World, check: bool) -> Callable[[], None]:
    """Return what people type, in a function."""
    return lambda: allreduce(x, op, world=world, check=check)


def least_bytes(world: World, plan: Plan, shared: bool, nbytes: int) -> float:
    """Return the bytes that must be moved: in the memory of one node, or out of each of several."""
    collective, nodes = plan.collective, len(world.main.nodes)
    if nodes > 1:
        return nbytes * collective.busbw(nodes)
    moved = collective.moved_if_shared if shared else None
    return nbytes * (moved or collective.moved)(world.size)


def _times(world: World, plan: Plan, name: str, nbytes: int, taken: Sequence[float]) -> Row:
    found = spread(taken)
    algbw = nbytes / found["median_s"] / 1e9
    return {
        "operation": plan.collective.name,
        "algorithm": name,
        "bytes": nbytes,
        "ranks": world.size,
        "dtype": plan.dtype.name,
        "op": plan.op,
        **found,
        "algbw": algbw,
        "busbw": algbw * plan.collective.busbw(world.size),
    }
