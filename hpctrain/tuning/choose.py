"""Turn times of algorithms over lengths, measured or predicted, into the thresholds of `auto`.

Plain arrays, arrays in node memory and dtypes that MPI cannot reduce have a table of thresholds
each (core/thresholds.py); the three are merged in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import pydantic

from hpctrain.collectives import ALLREDUCE
from hpctrain.collectives.dispatch import Choices, Pick
from hpctrain.core.thresholds import Steps, Times, at, steps, taken_at

NOISY = 0.25  #: interquartile range over the median: the machine was busy
FALLBACK = "recursive-doubling"  #: any dtype, any layout: without other times
NEVER = ("null",)  #: reduces nothing

Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, pydantic.Field(gt=0, le=1 << 60)]
Buckets = tuple[tuple[int, float], ...]  #: ((bytes of a bucket, seconds per byte), ...)


@dataclass(frozen=True)
class Row:
    """The median seconds of an algorithm with arrays of `bytes`, in node memory or plain."""

    algorithm: str
    in_memory: bool
    bytes: Bytes
    seconds: Positive
    spread: Share | None = None  #: interquartile range of the repeats over the median


@dataclass(frozen=True)
class Plan:
    """The choices of a group in a form that can be sent: algorithms by name."""

    plain: Steps
    kept: Steps
    ours: Steps
    buckets: Buckets
    measured: bool


def plan(rows: Iterable[Row], buckets: Buckets, measured: bool) -> Plan:
    """Return the plan with the fastest algorithms of `rows`."""
    usable = [row for row in rows if row.algorithm in ALLREDUCE and row.algorithm not in NEVER]
    plain = [row for row in usable if not row.in_memory]
    node_rows = [row for row in usable if row.in_memory] or plain
    stairs = (plain, node_rows, _non_mpi(plain))
    plain_steps, node_steps, non_mpi_steps = (steps(times(subset), FALLBACK) for subset in stairs)
    return Plan(plain_steps, node_steps, non_mpi_steps, buckets, measured)


def choices(plan: Plan) -> Choices:
    """Return the three tables of thresholds in `plan`, merged."""
    stairs = (plan.plain, plan.kept, plan.ours)
    starts = sorted({start for stair in stairs for start, _ in stair})
    picks = [Pick(*(ALLREDUCE[at(stair, start)] for stair in stairs)) for start in starts]
    return Choices(tuple(starts[1:]), tuple(picks), plan.buckets, plan.measured)


def times(rows: Iterable[Row]) -> Times:
    """Return the seconds of `rows` by length, ascending, and algorithm."""
    result: Times = {}
    for row in sorted(rows, key=lambda row: row.bytes):
        result.setdefault(row.bytes, {})[row.algorithm] = row.seconds
    return result


def changes(rows: Sequence[Row]) -> list[tuple[int, int, set[str]]]:
    """Return the pairs of neighbouring lengths between which the choice changes, with both choices.

    Include the choice for dtypes MPI cannot reduce; it has thresholds of its own.
    """
    stairs = [taken_at(times(subset)) for subset in (rows, _non_mpi(rows))]
    return [
        (a, b, {stair[n] for stair in stairs for n in (a, b) if n in stair})
        for a, b in pairwise(stairs[0])
        if stairs[0][a] != stairs[0][b]
    ]


def _non_mpi(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.algorithm != "native"]


def noisy(rows: Iterable[Row]) -> float | None:
    """Return the spread of the fastest's repeats if it exceeds NOISY, else None.

    The upper quartile of the spreads of the fastest at each size and kind of array.
    """
    fastest: dict[tuple[int, bool], Row] = {}
    for row in rows:
        best = fastest.setdefault((row.bytes, row.in_memory), row)
        if row.seconds < best.seconds:
            fastest[row.bytes, row.in_memory] = row
    spreads = sorted(row.spread for row in fastest.values() if row.spread is not None)
    quartile = spreads[len(spreads) * 3 // 4] if spreads else 0.0
    return quartile if quartile > NOISY else None
