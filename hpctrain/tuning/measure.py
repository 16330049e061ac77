"""Timing of collective calls: interleaved rounds, the slowest rank's time, and percentiles.

On a busy machine two runs differ by more than two rivals. So rivals alternate within one run,
A B C A B C ..., and ratios compare neighbours in time. A call as short as a barrier cannot be timed
alone: several calls are made between two readings of the clock. All but the first call find their
arrays in the caches; so calls are also timed one by one, cold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from hpctrain.collectives import all_gather_short
from hpctrain.core.xp import Array, finish
from hpctrain.transport.link import Link, Request

COLD_BYTES = 8 << 20  #: of other arrays that a rank writes before a call that is timed cold
ContextFactory = Callable[[], AbstractContextManager[Any]]
NO_CONTEXTS: Mapping[str, ContextFactory] = MappingProxyType({})


class TimedLink(Protocol):
    """The part of a link that benchmarks use, or a substitute for one."""

    rank: int

    def isend(self, x: Any, dest: int) -> Request:
        """Start to send `x` to rank `dest`."""

    def irecv(self, x: Any, source: int) -> Request:
        """Start to fill `x` from rank `source`."""


def time_calls(
    link: Link, function: Callable[[], Any], calls: int = 1, memory: Array | None = None
) -> float:
    """Return the seconds per call that the slowest rank spends in `calls` calls of `function`.

    All ranks start together and make the calls back to back; collective. If `memory` lies on a
    device, calls end when that device has completed them.
    """
    repeats = range(calls)
    link.barrier()
    start = time.perf_counter()
    for _ in repeats:
        function()
    if memory is not None:
        finish(memory)
    elapsed = np.array([(time.perf_counter() - start) / calls])
    return float(all_gather_short(link, elapsed.view(np.uint8)).view(np.float64).max())


def time_cold_call(
    link: Link, function: Callable[[], Any], eviction_array: Array, memory: Array | None = None
) -> float:
    """Return the seconds of one call on the slowest rank, with its caches full of `eviction_array`.

    Before it every rank writes to all of `eviction_array`, as a training step does to its arrays
    between two reductions, and waits at a barrier; collective. `memory` as in `time_calls`. An
    untimed call goes first, so that the code in the outer caches does not depend on the previous
    contender.
    """
    function()
    eviction_array += 1
    return time_calls(link, function, 1, memory)


def ping_pong(link: TimedLink, peer: int, x: Any, calls: int, sends_first: bool) -> None:
    """Send `x` to `peer` and back `calls` times; one of the two is `sends_first`."""
    for _ in range(calls):
        if sends_first:
            link.isend(x, peer).wait()
            link.irecv(x, peer).wait()
        else:
            link.irecv(x, peer).wait()
            link.isend(x, peer).wait()


def time_interleaved(
    link: Link,
    rivals: Mapping[str, Callable[[], Any]],
    rounds: int,
    warm_up: int = 3,
    calls: int = 1,
    contexts: Mapping[str, ContextFactory] = NO_CONTEXTS,
    eviction_array: Array | None = None,
) -> dict[str, list[float]]:
    """Return each rival's seconds per call, interleaved: A B C A B C ..., after a warm-up.

    Per round every rival makes `calls` calls back to back. `contexts`: the context manager of a
    rival while it is measured, such as one for threads that would disturb all others.
    With `eviction_array` each call is timed cold, see `time_cold_call`.
    """
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for round_number in range(warm_up + rounds):
        for name, function in rivals.items():
            with contexts.get(name, nullcontext)():
                if eviction_array is None:
                    elapsed = time_calls(link, function, calls)
                else:
                    elapsed = time_cold_call(link, function, eviction_array)
            if round_number >= warm_up:
                seconds[name].append(elapsed)
    return seconds


def summarize_times(seconds: Sequence[float]) -> dict[str, float]:
    """Return median and percentiles in seconds, and the interquartile range over the median."""
    p5, low, median, high, p95, p99 = np.percentile(seconds, [5, 25, 50, 75, 95, 99]).tolist()
    spread = (high - low) / median if median else 0.0
    return {"median_s": median, "p5_s": p5, "p95_s": p95, "p99_s": p99, "spread": spread}


def median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the median of a/b over pairs measured next to each other."""
    return float(np.median(np.array(a) / np.array(b)))
