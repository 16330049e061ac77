"""Reduced tables: every pair of values still occurs, and the omitted rows are known."""

from __future__ import annotations

import sys
from itertools import combinations, product
from types import SimpleNamespace

import pytest
from tables import Measured, enough, latin, spare

COLUMNS = {"call": range(5), "where": range(4), "ranks": range(2, 10)}
PRODUCT = [[(name, str(v)) for name, v in zip(COLUMNS, row, strict=True)]
           for row in product(*COLUMNS.values())]  # fmt: skip


@pytest.mark.parametrize("rows", [PRODUCT, PRODUCT[::7], PRODUCT[::-1]])
def test_every_two_values_meet_in_few_rows(rows):
    chosen = [rows[i] for i in enough(rows)]
    assert pairs(chosen) == pairs(rows)
    maximum = len(COLUMNS["call"]) * len(COLUMNS["ranks"])  # two columns alone need so many
    assert len(chosen) <= 1.2 * maximum


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


def test_a_table_of_two_columns_is_whole():
    rows = [row[:2] for row in PRODUCT[:: len(COLUMNS["ranks"])]]
    assert sorted(enough(rows)) == list(range(len(rows)))


def item(row, *marks, table="test_it"):
    """Return what the functions see of a row of pytest's."""
    callspec = SimpleNamespace(params=dict(row)) if row else None
    return SimpleNamespace(nodeid=f"{table}[{row}]", keywords=set(marks), callspec=callspec)


def test_each_kind_of_ranks_has_its_rows():
    threads, mpi = ([item(row, "pairs", *extra) for row in PRODUCT] for extra in ((), ("mpi",)))
    remaining = [len(spare(items)) for items in (threads, mpi, threads + mpi)]
    short = len(PRODUCT) - len(enough(PRODUCT))
    assert remaining == [short, short, 2 * short]


def test_rows_that_are_for_full_stand_for_no_others():
    small = [[("a", str(i % 2)), ("b", str(i // 2 % 2)), ("c", str(i // 4))] for i in range(8)]
    items = [item(row, "pairs", *(["full"] if i < 4 else [])) for i, row in enumerate(small)]
    assert spare(items) == []  # what is left has two columns that change


def test_tables_without_the_mark_are_whole():
    assert spare([item(row) for row in PRODUCT]) == []


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
