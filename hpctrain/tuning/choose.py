"""From times of algorithms over lengths, measured or predicted, to the staircases of `auto`.

Plain arrays, arrays in node memory and what MPI cannot reduce have a staircase each (stairs.py),
which are laid over each other in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import pydantic

from hpctrain.collectives import ALLREDUCE
from hpctrain.collectives.choices import Choices, Pick
from hpctrain.stairs import Steps, Times, at, steps, taken_at

NOISY = 0.25  #: from quartile to quartile, as share of the median: the machine did something else
FALLBACK = "recursive-doubling"  #: any dtype, any layout: where nothing else is known
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
    spread: Share | None = None  #: of repeats: from quartile to quartile, as share of the median


@dataclass(frozen=True)
class Plan:
    """What a group will take, in words that can be sent: algorithms by their names."""

    plain: Steps
    kept: Steps
    ours: Steps
    buckets: Buckets
    measured: bool


def plan(rows: Iterable[Row], buckets: Buckets, measured: bool) -> Plan:
    """Return the plan that `rows` suggest."""
    known = [row for row in rows if row.algorithm in ALLREDUCE and row.algorithm not in NEVER]
    plain = [row for row in known if not row.in_memory]
    kept = [row for row in known if row.in_memory] or plain
    stairs = (plain, kept, _ours(plain))
    plain_steps, kept_steps, our_steps = (steps(times(some), FALLBACK) for some in stairs)
    return Plan(plain_steps, kept_steps, our_steps, buckets, measured)


def choices(plan: Plan) -> Choices:
    """Return the three staircases of `plan` laid over each other."""
    stairs = (plan.plain, plan.kept, plan.ours)
    starts = sorted({start for stair in stairs for start, _ in stair})
    picks = [Pick(*(ALLREDUCE[at(stair, start)] for stair in stairs)) for start in starts]
    return Choices(tuple(starts[1:]), tuple(picks), plan.buckets, plan.measured)


def times(rows: Iterable[Row]) -> Times:
    """Return the seconds of `rows` by length, ascending, and algorithm."""
    found: Times = {}
    for row in sorted(rows, key=lambda row: row.bytes):
        found.setdefault(row.bytes, {})[row.algorithm] = row.seconds
    return found


def changes(rows: Sequence[Row]) -> list[tuple[int, int, set[str]]]:
    """Return between which neighbouring lengths the pick changes, and all who are taken at these.

    Also whom what MPI cannot reduce takes there: it needs times of its own in between.
    """
    stairs = [taken_at(times(some)) for some in (rows, _ours(rows))]
    return [
        (a, b, {taken[n] for taken in stairs for n in (a, b) if n in taken})
        for a, b in pairwise(stairs[0])
        if stairs[0][a] != stairs[0][b]
    ]


def _ours(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.algorithm != "native"]


def noisy(rows: Iterable[Row]) -> float | None:
    """Return how far the repeats of the fastest lie apart, if that is more than NOISY, else None.

    Of each size and kind of array the fastest; of these spreads the upper quartile.
    """
    fastest: dict[tuple[int, bool], Row] = {}
    for row in rows:
        best = fastest.setdefault((row.bytes, row.in_memory), row)
        if row.seconds < best.seconds:
            fastest[row.bytes, row.in_memory] = row
    spreads = sorted(row.spread for row in fastest.values() if row.spread is not None)
    found = spreads[len(spreads) * 3 // 4] if spreads else 0.0
    return found if found > NOISY else None
