"""Rings of tables: every value occurs in the first, and ten tenths have all other rows."""

from __future__ import annotations

import sys
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest
from tables import Measured, covering, deal, first_ring, latin, tenth

COLUMNS = {"call": range(5), "where": range(4), "ranks": range(2, 10)}
PRODUCT = [[(name, str(v)) for name, v in zip(COLUMNS, row, strict=True)]
           for row in product(*COLUMNS.values())]  # fmt: skip


@pytest.mark.parametrize("rows", [PRODUCT, PRODUCT[::7], PRODUCT[::-1]])
def test_every_value_occurs_in_few_rows(rows):
    chosen = [rows[i] for i in covering(rows)]
    assert {value for row in chosen for value in row} == {value for row in rows for value in row}
    assert len(chosen) == max(map(len, COLUMNS.values()))


def pairs(rows):
    return {pair for row in rows for pair in combinations(row, 2)}


@pytest.mark.parametrize("begin", range(3))
def test_a_latin_square_has_every_two_values_in_a_third_of_the_rows(begin):
    columns = [range(5), range(6), range(3)]
    rows = [[*enumerate(row)] for row in latin(columns, begin)]
    assert pairs(rows) == pairs([[*enumerate(row)] for row in product(*columns)])
    assert len(rows) == 30


def test_latin_squares_have_all_rows_together():
    columns = [range(6), range(3)]
    rows = [row for begin in range(3) for row in latin(columns, begin)]
    assert sorted(rows) == [*product(*columns)]


def item(row, *marks, table="test_it", **numbers):
    """Return what the functions see of a row of pytest's; `numbers` are those of its markers."""
    callspec = SimpleNamespace(params=dict(row)) if row else None
    markers = {name: SimpleNamespace(args=(number,)) for name, number in numbers.items()}
    return SimpleNamespace(
        nodeid=f"{table}[{row}]", keywords=set(marks), callspec=callspec,
        get_closest_marker=markers.get, path=Path(table.partition("::")[0]),
    )  # fmt: skip


def test_each_kind_of_ranks_has_its_rows():
    threads, mpi = ([item(row, *extra) for row in PRODUCT] for extra in ((), ("mpi",)))
    for row in mpi:
        row.nodeid = f"mpi-{row.nodeid}"
    assert [len(first_ring(items)) for items in (threads, mpi, threads + mpi)] == [8, 8, 16]


def test_a_test_without_a_table_is_in_the_first_ring():
    assert len(first_ring([item((), table=name) for name in ("test_a", "test_b")])) == 2


def test_a_sample_has_as_many_rows_as_it_says():
    assert len(first_ring([item(row, sample=3) for row in PRODUCT])) == 3


@pytest.mark.parametrize(
    "room, mark, is_either",
    [("engines", "processes", False), ("engines", "either", True), ("engines", "mpi", True),
     ("transport", "mpi", False), ("transport", "either", True)],
)  # fmt: skip
def test_a_row_that_is_the_same_with_either_mpi_runs_with_one(room, mark, is_either):
    items = [item((), mark, table=f"tests/{room}/test_{i}.py::test_it") for i in range(20)]
    first, second = (deal(items, number) for number in (0, 1))
    assert len(first | second) == 20
    assert len(first & second) == (0 if is_either else 20)
    assert first and second


def test_rows_for_full_stand_for_no_others():
    rows = [item([("a", str(i % 2))], *(["full"] if i == 0 else [])) for i in range(3)]
    assert first_ring(rows) == {rows[1].nodeid, rows[2].nodeid}


def test_ten_tenths_have_each_row_outside_of_the_first_ring_once():
    items = [item(row) for row in PRODUCT] + [item((), "full", table="test_long")]
    tenths = [tenth(items, number) for number in range(7, 17)]
    assert sorted(name for names in tenths for name in names) == sorted(
        {row.nodeid for row in items} - first_ring(items)
    )
    assert max(map(len, tenths)) < len(PRODUCT) / 5


def test_campaigns_are_in_no_tenth():
    items = [item((), "full", table=f"test_{limit_s}", timeout=limit_s) for limit_s in (600, 7200)]
    names = set().union(*(tenth(items, number) for number in range(10)))
    assert names == {"test_600[()]"}


@pytest.mark.parametrize(
    "row, measured",
    [([("a", "1")], True), ([("a", "0")], False), ([], True), ([("a", "0"), ("b", "0")], True)],
)
def test_rows_with_something_new_are_measured(row, measured):
    """Whoever traces, here this test, sees the others not, and all that comes after them."""
    observed, own, tracer = [], sys.gettrace(), lambda *_: None
    rows = Measured()
    next(rows.pytest_runtest_protocol(item([("a", "0")])))
    sys.settrace(tracer)
    try:
        run = rows.pytest_runtest_protocol(item(row))
        next(run)
        observed.append(sys.gettrace() is tracer)
        run.close()
        observed.append(sys.gettrace() is tracer)
    finally:
        sys.settrace(own)
    assert observed == [measured, True]
