"""Turn times of algorithms over lengths, measured or predicted, into the thresholds of `auto`.

Private arrays, arrays in node memory and dtypes that MPI cannot reduce have thresholds of their own
(core/thresholds.py); the three tables are merged in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le

from hpctrain.collectives import ALLREDUCE
from hpctrain.collectives.dispatch import Choice, Choices
from hpctrain.core.thresholds import Thresholds, Times, choices_at, lookup, thresholds_from

NOISY = 0.25  #: interquartile range over the median: the machine was busy
FALLBACK = "recursive-doubling"  #: any dtype, any layout: without other times
NEVER_CHOSEN = ("null",)  #: reduces nothing

# Limits of values in files, which pydantic checks when it reads one.
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0)]
Bytes = Annotated[int, Gt(0), Le(1 << 60)]
Buckets = tuple[tuple[int, float], ...]  #: ((bytes of a bucket, seconds per byte), ...)


@dataclass(frozen=True)
class AlgorithmTime:
    """The median seconds of an algorithm with arrays of `bytes`, in node memory or private."""

    __pydantic_config__: ClassVar = {"allow_inf_nan": False}
    algorithm: str
    in_memory: bool
    bytes: Bytes
    seconds: Positive
    spread: Share | None = None  #: interquartile range of the repeats over the median


@dataclass(frozen=True)
class TuningPlan:
    """The choices of a group as a message between ranks: algorithms by name."""

    default: Thresholds
    in_node_memory: Thresholds
    non_mpi: Thresholds
    buckets: Buckets
    measured: bool


def plan(rows: Iterable[AlgorithmTime], buckets: Buckets, measured: bool) -> TuningPlan:
    """Return the plan with the fastest algorithms of `rows`."""
    usable = [
        row for row in rows if row.algorithm in ALLREDUCE and row.algorithm not in NEVER_CHOSEN
    ]
    private_rows = [row for row in usable if not row.in_memory]
    in_node_memory = [row for row in usable if row.in_memory] or private_rows
    kinds = (private_rows, in_node_memory, _non_mpi(private_rows))
    default, node_memory, non_mpi = (thresholds_from(times(kind), FALLBACK) for kind in kinds)
    return TuningPlan(default, node_memory, non_mpi, buckets, measured)


def choices(plan: TuningPlan) -> Choices:
    """Return the three tables of thresholds in `plan`, merged."""
    tables = (plan.default, plan.in_node_memory, plan.non_mpi)
    starts = sorted({start for table in tables for start, _ in table})
    merged = [Choice(*(ALLREDUCE[lookup(table, start)] for table in tables)) for start in starts]
    return Choices(tuple(starts[1:]), tuple(merged), plan.buckets, plan.measured)


def times(rows: Iterable[AlgorithmTime]) -> Times:
    """Return the seconds of `rows` by length, ascending, and algorithm."""
    result: Times = {}
    for row in sorted(rows, key=lambda row: row.bytes):
        result.setdefault(row.bytes, {})[row.algorithm] = row.seconds
    return result


def changes(rows: Sequence[AlgorithmTime]) -> list[tuple[int, int, set[str]]]:
    """Return the pairs of neighbouring lengths between which the choice changes, with all choices.

    These include the choices for dtypes that MPI cannot reduce, which have their own thresholds.
    """
    chosen, non_mpi = choices_at(times(rows)), choices_at(times(_non_mpi(rows)))
    return [
        (a, b, {table[n] for table in (chosen, non_mpi) for n in (a, b) if n in table})
        for a, b in pairwise(chosen)
        if chosen[a] != chosen[b]
    ]


def _non_mpi(rows: Iterable[AlgorithmTime]) -> list[AlgorithmTime]:
    return [row for row in rows if row.algorithm != "native"]


def noisy(rows: Iterable[AlgorithmTime]) -> float | None:
    """Return the spread of the fastest's repeats if it exceeds NOISY, else None.

    The upper quartile of the spreads of the fastest at each size and kind of array.
    """
    fastest: dict[tuple[int, bool], AlgorithmTime] = {}
    for row in rows:
        fastest_row = fastest.setdefault((row.bytes, row.in_memory), row)
        if row.seconds < fastest_row.seconds:
            fastest[row.bytes, row.in_memory] = row
    spreads = sorted(row.spread for row in fastest.values() if row.spread is not None)
    quartile = spreads[len(spreads) * 3 // 4] if spreads else 0.0
    return quartile if quartile > NOISY else None
