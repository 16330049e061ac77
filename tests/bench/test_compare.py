"""The script that merges runs under two MPIs: which median is the rival, what is claimed of it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MIB = 1 << 20


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield import_module("compare")
    sys.modules.pop("compare")


def row(algorithm, nbytes, seconds, correct=True):
    return {
        "operation": "allreduce",
        "algorithm": algorithm,
        "bytes": nbytes,
        "ranks": 2,
        "median_s": seconds,
        "busbw": nbytes / seconds,
        "share_of_floor": 0.5,
        "correct": correct,
    }


def run(native, direct, correct=True):
    return [row("native", MIB, native), row("direct", MIB, direct, correct)]


def test_the_better_native_median_is_the_rival(compare):
    runs = [run(8.0, 1.0), run(4.0, 2.0), run(6.0, 3.0), run(5.0, 2.0)]
    merged = compare.merge(runs, ["A", "B", "A", "B"], "allreduce")
    times = {(one["mpi"], one["algorithm"]): one["times"]["native"] for one in merged}
    # medians over runs: native 7.0 under A and 4.5 under B, which is the rival of both
    assert times["A", "direct"] == 4.5 / 2.0 and times["B", "direct"] == 4.5 / 2.0
    assert times["A", "native"] == 4.5 / 7.0 and times["B", "native"] == 1.0


@pytest.mark.parametrize("direct, correct", [(1.0, True), (2.0, True), (1.0, False)])
def test_claims_fail_where_they_do_not_hold(compare, direct, correct):
    merged = compare.merge([run(4.0, direct, correct)], ["A"], "allreduce")
    held = compare.claims("allreduce", 2, merged)
    assert held.pop("allreduce: all results are right") is correct
    ((claim, holds),) = held.items()
    assert claim.startswith(f"allreduce: direct, A {4 / direct:.2f}x native (geometric mean, 1 MiB")
    assert holds is (4 / direct >= 3.0)
