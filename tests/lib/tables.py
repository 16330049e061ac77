"""Selection of the table rows to run, and of the rows on which coverage is measured.

A table that is a product of three or more independent columns (calls x places x numbers of ranks)
has many rows, and most of them test no new pair of values. With the marker `pairs` only as many
rows are run as are needed for every pair of values to occur; --full runs all rows. Columns that
depend on each other, such as an algorithm, a length and a number of ranks, need all rows.

A test that starts processes and whose result does not depend on the MPI is marked `either`; single
rows of a table by `rows_of`. `make test` runs them with one MPI, `make test-full` with both.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import combinations, product

import pytest

Value = tuple[str, str]  #: the name of a column, and what stands there


def values(item: pytest.Item) -> list[Value]:
    """Return what stands in the row of `item`; nothing where there is no table."""
    callspec = getattr(item, "callspec", None)
    return [(name, repr(value)) for name, value in callspec.params.items()] if callspec else []


def enough(rows: Sequence[Collection[Value]]) -> list[int]:
    """Return the indexes of rows in which all pairs of values meet that meet in any; few of them.

    Each time the row with most new pairs, of several the first: the same on all ranks of a job.
    """
    pairs = [set(combinations(row, 2)) for row in rows]
    remaining, chosen = set().union(*pairs), []
    while remaining:
        best = max(range(len(rows)), key=lambda i: len(pairs[i] & remaining))
        chosen.append(best)
        remaining -= pairs[best]
    return chosen


def latin(columns: Sequence[Sequence], begin: int = 0) -> Iterator[tuple]:
    """Yield rows of a product: one of as many as the shortest column is long; `begin` says which.

    Of three columns every two values meet in some row; of two each value is in some row, and those
    of another `begin` have the other pairs.
    """
    fewest = min(map(len, columns))
    for row in product(*map(enumerate, columns)):
        if (begin + sum(index for index, _ in row)) % fewest == 0:
            yield tuple(value for _, value in row)


def spare(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the rows of tables marked `pairs` whose pairs meet in others; MPI's have their own."""
    tables: dict[tuple[str, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "pairs" in item.keywords and "full" not in item.keywords:
            tables[item.nodeid.partition("[")[0], "mpi" in item.keywords].append(item)
    saved = {id(t[i]) for t in tables.values() for i in enough([values(item) for item in t])}
    return [item for table in tables.values() for item in table if id(item) not in saved]


def rows_of(table: Iterable, *pair: object) -> list:
    """Return the rows of a table; those that are not in `both` show the same with either MPI."""
    return [row if row in pair else _either(row) for row in table]


def _either(row: object) -> object:
    return pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.either)


class Measured:
    """Coverage is measured on the rows of a table in which some value is new, and on them alone.

    To trace the others, most of thousands, takes a third of the tests' time. What is reported is
    thus what these rows reach; all of them together reach no less.
    """

    def __init__(self) -> None:
        self._met: set[tuple[str, Value]] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        if self._is_measured(item):
            return (yield)
        local, threads = sys.gettrace(), threading.gettrace()
        sys.settrace(None)
        threading.settrace(None)
        try:
            return (yield)
        finally:
            threading.settrace(threads)
            sys.settrace(local)

    def _is_measured(self, item: pytest.Item) -> bool:
        row = {(item.nodeid.partition("[")[0], value) for value in values(item)}
        new = row - self._met
        self._met |= new
        return bool(new or not row)
