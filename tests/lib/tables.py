"""Selection of the table rows to run, and of the rows on which coverage is measured.

`make test` runs the first ring (--first): of each table as many rows as are needed for every value
of every column to occur. A test whose rows take long is marked `sample(n)`: n of these rows, those
that show most values. `make test-full` runs all rows (--full); pytest alone those that are not
marked `full`. --tenth K runs a tenth of the rows outside of the first ring, by their names.

A test that starts processes and whose result does not depend on the MPI is marked `either`; single
rows of a table by `rows_of`. Outside of MPI_ROOMS rows on MPI ranks are such, too. `make test` runs
them with one of the two MPIs (--either), `make test-full` with both.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest

LONG_S = 600
MPI_ROOMS = ("collectives", "transport", "user_collectives", "world")
Value = tuple[str, str]  #: the name of a column, and what stands there


def values(item: pytest.Item) -> list[Value]:
    """Return what stands in the row of `item`; nothing where there is no table."""
    callspec = getattr(item, "callspec", None)
    return [(name, repr(value)) for name, value in callspec.params.items()] if callspec else []


def covering(rows: Sequence[Collection[Value]]) -> list[int]:
    """Return the indexes of few rows in which each value of any row occurs, at least of one.

    Each time the row with most new values, of several the first: the same on all ranks of a job.
    """
    values = [set(row) for row in rows]
    remaining, chosen = set().union(*values), []
    while remaining or not chosen:
        best = max(range(len(rows)), key=lambda i: len(values[i] & remaining))
        chosen.append(best)
        remaining -= values[best]
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


def first_ring(items: Sequence[pytest.Item]) -> set[str]:
    """Return the names of the rows that `make test` runs; rows on MPI are a table of their own."""
    tables: dict[tuple[str, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "full" not in item.keywords:
            tables[item.nodeid.partition("[")[0], "mpi" in item.keywords].append(item)
    return {table[i].nodeid for table in tables.values() for i in _sampled(table)}


def _sampled(table: Sequence[pytest.Item]) -> list[int]:
    """Return the rows of a table that cover its values, no more of them than its `sample`."""
    marker = table[0].get_closest_marker("sample")
    return covering([values(item) for item in table])[: marker.args[0] if marker else None]


def deal(items: Sequence[pytest.Item], number: int) -> set[str]:
    """Return the names of rows; of those that are the same with either MPI half, 0 or 1."""
    return {item.nodeid for item in items if not _is_either(item) or half(item.path) == number}


def _is_either(item: pytest.Item) -> bool:
    is_mpi = "mpi" in item.keywords and item.nodeid.split("/")[1] not in MPI_ROOMS
    return is_mpi or "either" in item.keywords


def half(file: Path) -> int:
    """Return 0 or 1, drawn by a file's name: its rows stay together, since they share fixtures."""
    return zlib.crc32(file.name.encode()) % 2


def tenth(items: Sequence[pytest.Item], number: int) -> set[str]:
    """Return a tenth of the rows outside of the first ring, drawn by their names.

    Rows that may take longer than LONG_S, as campaigns do, are for --full alone.
    """
    names = {item.nodeid for item in items if not _is_long(item)} - first_ring(items)
    return {name for name in names if zlib.crc32(name.encode()) % 10 == number % 10}


def _is_long(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("timeout")
    return marker is not None and marker.args[0] > LONG_S


def changed_folders(root: Path) -> set[str]:
    """Return the folders of the package and of tests that the last ten commits changed."""
    command = ["git", "-C", str(root), "log", "-10", "--format=", "--name-only"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # not a checkout: nothing is known
        return set()
    return {
        name.split("/")[1] for name in names.split() if name.startswith(("hpctrain/", "tests/"))
    }


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
