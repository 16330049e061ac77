"""Planted errors: one of each kind, at its place, and gone again."""

from __future__ import annotations

import pytest
from mutants.plant import candidates, draw

SOURCE = '''"""A module."""
import numpy as np


def total(rows: "int32", begin: int) -> float:
    if begin < 0:
        raise ValueError(f"begin: {begin + 1}")
    rows.wait()
    return np.zeros(rows, np.float64) + np.dot(rows, begin)
'''
LINES = {
    ("sign", 9): ("    return (np.zeros(rows, np.float64) - np.dot(rows, begin))",),
    ("off_by_one", 6): ("    if (begin <= 0):", "    if begin < 1:"),
    ("dropped_wait", 8): ("    pass",),
    ("swapped_arguments", 9): (
        "    return np.zeros(np.float64, rows) + np.dot(rows, begin)",
        "    return np.zeros(rows, np.float64) + np.dot(begin, rows)",
    ),
    ("wrong_dtype", 9): ("    return np.zeros(rows, np.float32) + np.dot(rows, begin)",),
    ("missing_check", 6): ("    if False:",),
}


@pytest.fixture
def root(tmp_path):
    (tmp_path / "hpctrain").mkdir()
    (tmp_path / "hpctrain" / "module.py").write_text(SOURCE)
    return tmp_path


def test_each_kind_changes_its_line_alone(root):
    file, changes = root / "hpctrain" / "module.py", {}
    for mutant in candidates(file, root):
        restore = mutant.apply(root)
        line = file.read_text().splitlines()[mutant.line - 1]
        changes.setdefault((mutant.kind, mutant.line), set()).add(line)
        restore()
        assert file.read_text() == SOURCE
    assert changes == {place: set(lines) for place, lines in LINES.items()}


def test_a_list_is_a_function_of_its_seed(root):
    assert draw(root, 1, 6) == draw(root, 1, 6)
    assert {mutant.kind for mutant in draw(root, 1, 6)} == {kind for kind, _ in LINES}
