"""JSON that every reader takes: numbers that are not finite are null, and named."""

from __future__ import annotations

import json
from math import inf, nan

import numpy as np
import pytest

from hpctrain.core.run_files import run_folder
from hpctrain.core.strict_json import to_json

VALUES = [
    ({"step": 1, "loss": 0.5}, {"step": 1, "loss": 0.5}),
    ({"step": 1, "loss": nan}, {"step": 1, "loss": None, "not_finite": ["loss"]}),
    ({"a": [1.0, -inf], "b": np.float64(inf)},
     {"a": [1.0, None], "b": None, "not_finite": ["a", "b"]}),
    ([{"a": {"b": nan}}, (2, nan)], [{"a": {"b": None, "not_finite": ["b"]}}, [2, None]]),
    (nan, None),
]  # fmt: skip


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


@pytest.mark.parametrize("value, read", VALUES)
def test_numbers_that_are_not_finite_are_null_and_named(value, read):
    assert json.loads(to_json(value), parse_constant=refuse) == read


def test_the_files_of_a_run_are_strict(tmp_path):
    run_folder.append_row(tmp_path, {"step": 1, "train_loss": nan})
    run_folder.append_row(tmp_path, {"step": 2, "train_loss": 1.0})
    run_folder.cut_rows(tmp_path, 1)
    run_folder.write_summary(tmp_path, {"status": "failed", "test_loss": inf})
    (row,) = (tmp_path / run_folder.METRICS).read_text().splitlines()
    assert json.loads(row, parse_constant=refuse)["not_finite"] == ["train_loss"]
    summary = json.loads((tmp_path / run_folder.SUMMARY).read_text(), parse_constant=refuse)
    assert (summary["test_loss"], summary["not_finite"]) == (None, ["test_loss"])
    assert run_folder.rows(tmp_path)[0]["train_loss"] is None
