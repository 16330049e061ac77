"""Tables that are thinned: every two values meet all the same, and what is left out is known."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from tables import enough

COLUMNS = {"call": range(5), "where": range(4), "ranks": range(2, 10)}
PRODUCT = [[(name, str(v)) for name, v in zip(COLUMNS, row, strict=True)]
           for row in product(*COLUMNS.values())]  # fmt: skip


@pytest.mark.parametrize("rows", [PRODUCT, PRODUCT[::7], PRODUCT[::-1]])
def test_every_two_values_meet_in_few_rows(rows):
    chosen = [rows[i] for i in enough(rows)]
    assert pairs(chosen) == pairs(rows)
    most = len(COLUMNS["call"]) * len(COLUMNS["ranks"])  # two columns alone need so many
    assert len(chosen) <= 1.2 * most


def pairs(rows):
    return {pair for row in rows for pair in combinations(row, 2)}


def test_a_table_of_two_columns_is_whole():
    rows = [row[:2] for row in PRODUCT[:: len(COLUMNS["ranks"])]]
    assert sorted(enough(rows)) == list(range(len(rows)))
