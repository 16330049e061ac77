"""Stragglers: scores, the rank that a warning names, and its causes."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest

from hpctrain.training.stragglers import (
    ROWS,
    RankFacts,
    Stragglers,
    core_wait_s,
    known_causes,
    possible_causes,
    score,
)

NAN = float("nan")
#: compute time and kind of work of each rank -> scores
SCORES = {
    "equal": ([1, 1, 1], [0, 0, 0], [1, 1, 1]),
    "one is slow": ([1, 1, 1.5], [0, 0, 0], [1, 1, 1.5]),
    "two ranks": ([1, 3], [0, 0], [0.5, 1.5]),
    "a server": ([1, 1.2, 1, 0.1], [0, 0, 0, -1], [1, 1.2, 1, NAN]),
    "stages": ([1, 4, 1, 6], [0, 1, 0, 1], [1, 0.8, 1, 1.2]),
    "a stage of one rank": ([1, 4], [0, 1], [NAN, NAN]),
    "asynchronous": ([1, 4], [-1, -1], [NAN, NAN]),
    "short": ([0.01, 0.03, 0.01], [0, 0, 0], [NAN, NAN, NAN]),
}


@pytest.mark.parametrize("case", SCORES)
def test_score(case: str) -> None:
    compute_s, kinds, expected = SCORES[case]
    scores = score(np.array(compute_s, float), np.array(kinds, float), 0.1)
    np.testing.assert_allclose(scores, expected)


FACTS: RankFacts = {"cores": [0, 1], "blas_threads": 2, "mhz": 3000.0, "load": 1.5}


def facts_of(*differences: dict) -> list[RankFacts]:
    return [{**FACTS, "cores": [2 * i, 2 * i + 1], **d} for i, d in enumerate(differences)]  # type: ignore[typeddict-item]


#: facts of ranks 0, 1, 2; the delay of rank 1 -> words on the causes of rank 1, known and possible
CAUSES = {
    "nothing": (facts_of({}, {}, {}), 0.0, [], []),
    "shares a core": (facts_of({"cores": [0]}, {"cores": [0]}, {"cores": [1]}), 0.0,
                      ["it shares 1 core with rank 0"], []),
    "all share": (facts_of(*[{"cores": [0, 1]}] * 3), 0.0, [], []),
    "a core of its own": (facts_of(*[{"cores": [i]} for i in range(3)]), 0.0, [], []),
    "others have its core": (facts_of({}, {}, {}), 0.3, ["for 30% of its compute time"], []),
    "a delay as usual": (facts_of({}, {}, {}), 0.04, [], []),
    "fewer cores": (facts_of({}, {"cores": [2]}, {}), 0.0, [], ["1 cores, others 2"]),
    "fewer threads": (facts_of({}, {"blas_threads": 1}, {}), 0.0, [], ["1 BLAS threads, others 2"]),
    "a lower clock": (facts_of({}, {"mhz": 2000.0}, {}), 0.0, [], ["2000 MHz, others 3000"]),
    "no clock": (facts_of({"mhz": None}, {"mhz": None}, {"mhz": None}), 0.0, [], []),
}  # fmt: skip


@pytest.mark.parametrize("case", CAUSES)
def test_causes(case: str) -> None:
    facts, delay, known, possible = CAUSES[case]
    measured = list(known_causes(1, facts, ["n"] * 3, [0.0, delay, 0.01]))
    causes = measured, list(possible_causes(1, facts))
    for texts, words in zip(causes, (known, possible), strict=True):
        assert len(texts) == len(words), texts
        assert all(word in text for word, text in zip(words, texts, strict=True))


#: factors of rank 1's compute time in each row -> the row at which it is named
NAMED = {
    "never": ([1.1] * 9, None),
    "always": ([1.5] * 9, ROWS),  # the first row begins the clock of waits
    "twice in a row": ([1, 1.5, 1.5, 1, 1.5, 1.5, 1], None),
    "later": ([1, 1, 1, 1.5, 1.5, 1.5, 1.5], 5),
}


@pytest.mark.parametrize("case", NAMED)
def test_a_rank_is_named_once(case: str, caplog: pytest.LogCaptureFixture) -> None:
    factors, expected = NAMED[case]
    world = SimpleNamespace(
        rank=0, size=3, hosts=("n0", "n1", "n2"), gather=lambda text: [text] * 3
    )
    mesh = SimpleNamespace(everyone=world, data=SimpleNamespace(grid=None))
    engine = SimpleNamespace(worker=0, asynchronous=False)
    stragglers = Stragglers(mesh, engine, slow_rank=1)  # type: ignore[arg-type]
    total, rows = np.zeros(3), []
    with caplog.at_level(logging.WARNING):
        for number, factor in enumerate(factors):
            total = total + np.array([1.0, factor, 1.0])
            numbers = {"compute_s": total, "core_wait_s": np.zeros(3), "kind_of_work": np.zeros(3)}
            stragglers.row(numbers)
            rows += [number] * (len(caplog.records) - len(rows))
    assert rows == [] if expected is None else rows == [expected]
    if rows:
        text = caplog.records[0].getMessage()
        assert text.startswith("rank 1 on n1 computes for 1.50 times as long")
        assert "known: planted by [faults] slow_rank" in text
    assert stragglers.scores(numbers) == [1.0, pytest.approx(np.mean(factors), abs=1e-4), 1.0]


def test_the_time_without_a_core(tmp_path) -> None:
    path = tmp_path / "schedstat"
    assert core_wait_s(path) == 0.0
    path.write_text("5000000000 1500000000 77\n")
    assert core_wait_s(path) == 1.5
    path.write_text("0\n")
    assert core_wait_s(path) == 0.0


@pytest.mark.processes
@pytest.mark.either
def test_a_planted_slow_rank_is_named(hpctrain, tmp_path) -> None:
    run = tmp_path / "run"
    ended = hpctrain(
        *("train", "digits", "--epochs", "6", "--out", run, "--set", "faults.slow_rank=1"),
        *("--set", "faults.slow_factor=3", "--set", "faults.step_ms=15"),
        ranks=2,
    )
    assert ended.stderr.count("times as long per step") == 1, ended.stderr
    assert "rank 1 on " in ended.stderr and "planted by [faults]" in ended.stderr
    scores = json.loads((run / "summary.json").read_text())["straggler_scores"]
    assert 1.3 < scores[1] < 1.6 and 0.4 < scores[0] < 0.7  # a median of two is their mean
