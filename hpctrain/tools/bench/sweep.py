"""Time a collective over sizes: all contenders take turns on the same buffer in one run.

For each size, each contender is called once on random data, and its result is compared with
float64. Then all contenders and the roofline are timed on zeros, so that no sum overflows. Another
timing has cold caches.

Results are reported as a fraction of the roofline. On one node the limit is memory: all ranks
stream `a += b` over private arrays; each moves 3n bytes. On several nodes the limit is the link:
one message from one node to another. The arrays have the length of the measured vector, so both fit
into the caches or neither does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hpctrain.collectives import Group, all_gather_bytes, operation
from hpctrain.tools.bench.base import Bench
from hpctrain.tools.bench.measured_collectives import (
    NATIVE,
    NATIVE_UNBOUND,
    Collective,
    CollectiveCall,
)
from hpctrain.tools.bench.rivals import Rival
from hpctrain.transport.shared_memory.host import aligned_zeros
from hpctrain.tuning.measure import (
    COLD_BYTES,
    ContextFactory,
    median_ratio,
    summarize_times,
    time_interleaved,
)
from hpctrain.tuning.select import algorithm_name, auto
from hpctrain.world import World
from hpctrain.world.calls.calls import allreduce

FLOOR_NAME = "floor"
MAX_BYTES_PER_ROUND, MAX_CALLS = 1 << 20, 64
RIVAL_WARM_UP_CALLS = 2  # after its threads wake up
Row = dict[str, Any]
BYTES_STREAMED_PER_BYTE = 3  #: bytes moved per byte of `a += b`: two reads, one write


@dataclass(frozen=True)
class SweepPlan(Bench):
    """The contenders and sizes of a measurement."""

    collective: Collective
    sizes: Sequence[int]
    algorithms: Sequence[str]
    dtype: np.dtype
    op: str = "sum"
    in_node_memory: bool = True  #: whether buffers lie in node memory, as gradients do


@dataclass(frozen=True)
class Contender:
    """A collective call, and the array that holds its result.

    If the call returns an array, that array holds the result.
    """

    call: Callable[[], Any]
    result: np.ndarray
    awake_context: ContextFactory = nullcontext  #: context manager around the calls
    warm_up_calls: int = 1  #: untimed calls in each turn

    @contextmanager
    def warmed_up(self) -> Iterator[None]:
        """Make the warm-up calls; before them the caches hold another contender's data."""
        with self.awake_context():
            for _ in range(self.warm_up_calls):
                self.call()
            yield


def calls_per_round(nbytes: int) -> int:
    """Return the calls between two readings of the clock: 64 up to 16 KiB, 1 from 1 MiB.

    One call of a microsecond is too short to time after a barrier; OSU's benchmarks loop, too.
    """
    return max(1, min(MAX_CALLS, MAX_BYTES_PER_ROUND // max(1, nbytes)))


def run(world: World, plan: SweepPlan, rivals: Mapping[str, Rival]) -> Iterator[list[Row]]:
    """Yield each contender's row for each size; collective."""
    itemsize = plan.dtype.itemsize
    lengths = sorted({plan.collective.length(n, itemsize, world.size) for n in plan.sizes})
    allocate = world.memory.zeros if plan.in_node_memory else np.empty
    buffer = allocate(lengths[-1], plan.dtype)
    buffer.fill(0)  # untouched pages all map to one page of zeros
    for length in lengths:
        yield _measure_length(world, plan, rivals, buffer[:length])


def make_contenders(
    world: World, plan: SweepPlan, rivals: Mapping[str, Rival], x: np.ndarray
) -> dict[str, Contender]:
    """Return the contenders for flat `x`, by name."""
    contenders: dict[str, Contender] = {}
    name, op = plan.collective.name, operation(plan.op, plan.dtype)
    for algorithm in plan.algorithms:
        if algorithm == NATIVE:
            contenders[algorithm] = Contender(*world.link.endpoint.native.bind(name, x, op))
        elif algorithm == NATIVE_UNBOUND:
            contenders[algorithm] = Contender(
                *world.link.endpoint.native.bind(f"{name} plain", x, op)
            )
        elif algorithm in plan.collective.public_calls:  # `ht.allreduce` itself
            check = plan.collective.public_calls[algorithm]
            call = partial(allreduce, x, plan.op, world=world, check=check)
            contenders[algorithm] = Contender(call, x)
        elif binder := plan.collective.binders.get(algorithm):
            contenders[algorithm] = Contender(binder(world.main, x, op), x)
        else:
            call = partial(plan.collective.algorithms[algorithm], world.main, x, op)
            contenders[algorithm] = Contender(call, x)
    for rival_name, rival in rivals.items():
        contenders[rival_name] = Contender(
            rival.call(name, x, plan.op), x, rival.awake_context, RIVAL_WARM_UP_CALLS
        )
    return contenders


def check_result(
    world: World, plan: SweepPlan, contender: Contender, x: np.ndarray
) -> tuple[bool, bool]:
    """Return whether the result is correct on all ranks, and whether ranks share one array.

    Collective; fills `x` with random data.
    """
    collective_call = CollectiveCall(world.rank, world.size, x.size, plan.dtype, plan.op)
    plan.collective.prepare(x, collective_call)
    world.link.barrier()  # neighbours' memory must be filled before it is read
    with contender.awake_context():
        call_result = contender.call()
    result = contender.result if call_result is None else call_result
    is_correct = plan.collective.is_correct(result, collective_call)
    is_shared = not np.shares_memory(result, x)
    verdicts = all_gather_bytes(world.link, bytes((is_correct, is_shared)))
    return all(is_correct for is_correct, _ in verdicts), any(
        is_shared for _, is_shared in verdicts
    )


def _measure_length(
    world: World, plan: SweepPlan, rivals: Mapping[str, Rival], x: np.ndarray
) -> list[Row]:
    contenders = make_contenders(world, plan, rivals, x)
    verdicts = {
        name: check_result(world, plan, contender, x) for name, contender in contenders.items()
    }
    x.fill(0)
    floor, call_count = make_roofline(world.main, x), calls_per_round(x.nbytes)
    calls_by_name = {name: contender.call for name, contender in contenders.items()} | {
        FLOOR_NAME: floor.call
    }
    contender_contexts = {name: contender.warmed_up for name, contender in contenders.items()}
    seconds = time_interleaved(
        world.link, calls_by_name, plan.iterations, plan.warm_up, call_count, contender_contexts
    )
    streaming_s = float(np.median(seconds.pop(FLOOR_NAME)))
    calls_by_name.pop(FLOOR_NAME)
    cold_seconds = _measure_cold(world, plan, calls_by_name, contender_contexts, x.nbytes)
    rows = []
    for name, times_s in seconds.items():
        row = _make_row(world, plan, name, x.nbytes, times_s) | {"cold_s": cold_seconds.get(name)}
        if NATIVE in seconds:
            row["times_native"] = median_ratio(seconds[NATIVE], times_s)
        if name in plan.collective.public_calls:
            row["takes"] = algorithm_name(auto, world.main, x)
        is_correct, is_shared = verdicts[name]
        row["result"] = "shared" if is_shared else "in place"
        row["floor"] = floor.kind
        row["floor_s"] = (
            streaming_s * min_bytes_moved(world, plan, is_shared, x.nbytes) / floor.nbytes
        )
        row["share_of_floor"] = row["floor_s"] / row["median_s"]
        rows.append(row | {"rounds": plan.iterations, "calls": call_count, "correct": is_correct})
    return rows


def _measure_cold(
    world: World,
    plan: SweepPlan,
    calls_by_name: Mapping[str, Callable[[], Any]],
    contender_contexts: Mapping[str, ContextFactory],
    nbytes: int,
) -> dict[str, float]:
    """Return the median seconds with cold caches; empty if `nbytes` alone exceed the caches."""
    if nbytes > COLD_BYTES:
        return {}
    eviction_buffer = np.zeros(COLD_BYTES // 4, np.float32)
    link, rounds = world.link, (plan.iterations, plan.warm_up)
    seconds = time_interleaved(
        link, calls_by_name, *rounds, contexts=contender_contexts, eviction_array=eviction_buffer
    )
    return {name: float(np.median(times_s)) for name, times_s in seconds.items()}


def min_bytes_moved(world: World, plan: SweepPlan, is_shared: bool, nbytes: int) -> float:
    """Return the minimum bytes to move: in a single node's memory, or out of each node."""
    collective, nodes = plan.collective, len(world.main.nodes)
    if nodes > 1:
        return nbytes * collective.busbw(nodes)
    traffic = collective.shared_traffic if is_shared else None
    return nbytes * (traffic or collective.traffic)(world.size)


def _make_row(
    world: World, plan: SweepPlan, name: str, nbytes: int, times_s: Sequence[float]
) -> Row:
    statistics = summarize_times(times_s)
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


@dataclass(frozen=True)
class Roofline:
    """A call to time beside the contenders, and the bytes it moves in a node or over a link."""

    kind: str
    call: Callable[[], Any]
    nbytes: int


def make_roofline(group: Group, x: np.ndarray) -> Roofline:
    """Return the roofline for vectors like flat `x`: memory on one node, otherwise a link."""
    if len(group.nodes) <= 1:
        a, b = aligned_zeros(x.size, x.dtype), aligned_zeros(x.size, x.dtype)
        b.fill(0)  # untouched pages all map to one page, which stays in the cache
        return Roofline(
            "memory", partial(np.add, a, b, a), BYTES_STREAMED_PER_BYTE * x.nbytes * group.link.size
        )
    source_rank, target_rank = group.nodes[0][0], group.nodes[1][0]
    link = group.link
    calls = {
        source_rank: lambda: link.isend(x, target_rank).wait(),
        target_rank: lambda: link.irecv(x, source_rank).wait(),
    }
    # The other ranks do nothing: the clock waits for the two that communicate.
    return Roofline("link", calls.get(link.rank, lambda: None), x.nbytes)
