"""Turn times of algorithms over lengths, measured or predicted, into the thresholds of `auto`.

Private arrays, arrays in node memory and dtypes that MPI cannot reduce have thresholds of their own
(core/thresholds.py); the three tables are merged in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar

from hpctrain.collectives import ALLREDUCE
from hpctrain.collectives.dispatch import Choice, Choices
from hpctrain.core.thresholds import Thresholds, Times, choices_at, lookup, thresholds_from

MAX_SPREAD = 0.25  #: interquartile range over the median: the machine was busy
FALLBACK_ALGORITHM = "recursive-doubling"  #: any dtype, any layout: without other times
NEVER_CHOSEN = ("null",)  #: reduces nothing


class Limits:
    """Limits of a number in a file, which pydantic checks when it reads one.

    pydantic's own would be imported by every rank, also where there is no file.
    """

    def __init__(self, **limits: float):
        self._limits = limits

    def __get_pydantic_core_schema__(self, number: Any, handler: Any) -> dict[str, Any]:
        schema: dict[str, Any] = handler(number)
        return schema | self._limits


PositiveFloat = Annotated[float, Limits(gt=0)]
NonNegativeFloat = Annotated[float, Limits(ge=0)]
ByteCount = Annotated[int, Limits(gt=0, le=1 << 60)]
BucketCosts = tuple[tuple[int, float], ...]  #: ((bytes of a bucket, seconds per byte), ...)


@dataclass(frozen=True)
class AlgorithmTime:
    """The median seconds of an algorithm with arrays of `bytes`, in node memory or private."""

    __pydantic_config__: ClassVar[dict[str, bool]] = {"allow_inf_nan": False}
    algorithm: str
    in_memory: bool
    bytes: ByteCount
    seconds: PositiveFloat
    spread: NonNegativeFloat | None = None  #: interquartile range of the repeats over the median


@dataclass(frozen=True)
class TuningPlan:
    """The choices of a group as a message between ranks: algorithms by name."""

    default: Thresholds
    in_node_memory: Thresholds
    non_mpi: Thresholds
    buckets: BucketCosts
    measured: bool


def make_plan(rows: Iterable[AlgorithmTime], buckets: BucketCosts, measured: bool) -> TuningPlan:
    """Return the plan with the fastest algorithms of `rows`."""
    usable_rows = [
        row for row in rows if row.algorithm in ALLREDUCE and row.algorithm not in NEVER_CHOSEN
    ]
    private_rows = [row for row in usable_rows if not row.in_memory]
    in_node_memory = [row for row in usable_rows if row.in_memory] or private_rows
    row_groups = (private_rows, in_node_memory, _without_native(private_rows))
    default, node_memory, non_mpi = (
        thresholds_from(times_by_size(rows_of_kind), FALLBACK_ALGORITHM)
        for rows_of_kind in row_groups
    )
    return TuningPlan(default, node_memory, non_mpi, buckets, measured)


def make_choices(plan: TuningPlan) -> Choices:
    """Return the three tables of thresholds in `make_plan`, merged."""
    tables = (plan.default, plan.in_node_memory, plan.non_mpi)
    starts = sorted({start for table in tables for start, _ in table})
    merged_choices = [
        Choice(*(ALLREDUCE[lookup(table, start)] for table in tables)) for start in starts
    ]
    return Choices(tuple(starts[1:]), tuple(merged_choices), plan.buckets, plan.measured)


def times_by_size(rows: Iterable[AlgorithmTime]) -> Times:
    """Return the seconds of `rows` by length, ascending, and algorithm."""
    result: Times = {}
    for row in sorted(rows, key=lambda row: row.bytes):
        result.setdefault(row.bytes, {})[row.algorithm] = row.seconds
    return result


def find_changes(rows: Sequence[AlgorithmTime]) -> list[tuple[int, int, set[str]]]:
    """Return the pairs of neighbouring lengths between which the choice changes, with all choices.

    These include the choices for dtypes that MPI cannot reduce, which have their own thresholds.
    """
    chosen_by_size, non_mpi_by_size = (
        choices_at(times_by_size(rows)),
        choices_at(times_by_size(_without_native(rows))),
    )
    return [
        (
            a,
            b,
            {
                choices_by_size[n]
                for choices_by_size in (chosen_by_size, non_mpi_by_size)
                for n in (a, b)
                if n in choices_by_size
            },
        )
        for a, b in pairwise(chosen_by_size)
        if chosen_by_size[a] != chosen_by_size[b]
    ]


def _without_native(rows: Iterable[AlgorithmTime]) -> list[AlgorithmTime]:
    return [row for row in rows if row.algorithm != "native"]


def find_noise(rows: Iterable[AlgorithmTime]) -> float | None:
    """Return the spread of the fastest's repeats if it exceeds MAX_SPREAD, else None.

    The upper quartile of the spreads of the fastest at each size and kind of array.
    """
    fastest_rows: dict[tuple[int, bool], AlgorithmTime] = {}
    for row in rows:
        fastest_row = fastest_rows.setdefault((row.bytes, row.in_memory), row)
        if row.seconds < fastest_row.seconds:
            fastest_rows[row.bytes, row.in_memory] = row
    return exceeding_spread(row.spread for row in fastest_rows.values() if row.spread is not None)


def exceeding_spread(spreads: Iterable[float]) -> float | None:
    """Return the upper quartile of `spreads` if it exceeds MAX_SPREAD, else None."""
    ordered_spreads = sorted(spreads)
    quartile = ordered_spreads[len(ordered_spreads) * 3 // 4] if ordered_spreads else 0.0
    return quartile if quartile > MAX_SPREAD else None


def noise_warning(spread: float, command: str) -> str:
    """Return the warning for times of a busy machine; `command`: what to repeat."""
    return (
        f"noisy: the quartiles of repeats differ by {spread:.0%} of the median, expected at most "
        f"{MAX_SPREAD:.0%}: something else kept the machine busy; {command} again when it is quiet"
    )
