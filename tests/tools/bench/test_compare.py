"""The script that merges runs under two MPIs: the reference median, and the claims."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
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
    merged = compare.merge_runs(runs, ["A", "B", "A", "B"], "allreduce")
    times = {(item["mpi"], item["algorithm"]): item["times"]["native"] for item in merged}
    # medians over runs: native 7.0 under A and 4.5 under B, which is the rival of both
    assert times["A", "direct"] == 4.5 / 2.0 and times["B", "direct"] == 4.5 / 2.0
    assert times["A", "native"] == 4.5 / 7.0 and times["B", "native"] == 1.0


@pytest.mark.parametrize("direct, correct", [(1.0, True), (2.0, True), (1.0, False)])
def test_claims_fail_where_they_do_not_hold(compare, direct, correct):
    merged = compare.merge_runs([run(4.0, direct, correct)], ["A"], "allreduce")
    held = compare.check_claims("allreduce", 2, merged)
    assert held.pop("allreduce: all results are right") is correct
    ((claim, holds),) = held.items()
    assert claim.startswith(f"allreduce: direct, A {4 / direct:.2f}x native (geometric mean, 1 MiB")
    assert holds is (4 / direct >= 3.0)


def test_what_is_only_shown_is_no_claim(compare):
    """Of a plain call something is claimed beside MPI's own plain one, not beside its bound one."""
    rows = [
        row("native", 4, 1.0),
        row("native-plain", 4, 1.1),
        row("auto", 4, 1.2),
        row("auto-unchecked", 4, 1.25),
    ]
    reported = compare.check_claims("allreduce", 2, compare.merge_runs([rows], ["A"], "allreduce"))
    assert reported == {
        "allreduce: all results are right": True,
        "allreduce: auto-unchecked, A 0.88x own native-plain (least, at 4 B, 4 B), >= 0.7": True,
        "allreduce: auto, A 0.92x own native-plain (least, at 4 B, 4 B)": None,
        "allreduce: auto, A 0.83x own native (least, at 4 B, 4 B)": None,
    }


def step(algorithm, exposed_s):
    seconds = {"exposed_s": exposed_s, "alone_s": 1.0, "samples_per_s": 1.0}
    return row(algorithm, MIB, 1.0) | seconds | {"batch_per_rank": 32}


@pytest.mark.parametrize("own, holds", [(0.009, True), (0.011, False), (-0.002, True)])
def test_exposed_communication_is_a_third_of_the_least_of_a_rival(compare, own, holds):
    runs = [[step("auto", own), step("gloo", 0.06)], [step("auto", own), step("gloo", 0.03)]]
    merged = compare.merge_runs(runs, ["A", "B"], "step")
    claims = compare.check_claims("step", 2, merged)
    held = {reported: fine for reported, fine in claims.items() if "exposes" in reported}
    assert len(held) == 2 and set(held.values()) == {holds}
    assert all("of gloo's 30.00 ms, <= 1/3" in reported for reported in held)


def test_a_comparison_goes_on_where_it_was_stopped(compare, monkeypatch, tmp_path, capsys):
    """Every run is kept when it has ended; of those kept, only equal ones count."""
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(compare, "BENCHMARKS", tmp_path)
    created = []

    def bench(environment, ranks, rest):
        if len(created) == 3:
            raise KeyboardInterrupt
        created.append(environment.name)
        return {"machine": {"mpi": f"{environment.name} 1.0"}, "rows": run(4.0, 1.0)}

    def typed(*extra):
        argv = ["compare.py", "/x/a", "/x/b", "--parts", "allreduce", "--times", "2", *extra]
        monkeypatch.setattr(sys, "argv", argv)
        compare.main()

    monkeypatch.setattr(compare, "_run_job", bench)
    monkeypatch.setattr(compare, "_check_same_sources", lambda environment: None)
    with pytest.raises(KeyboardInterrupt):
        typed()
    assert created == ["a", "b", "a"]
    created.clear()
    with pytest.raises(SystemExit, match="0"):
        typed("--resume")
    assert created == ["b"] and "holds: allreduce: direct, a 4.00x" in capsys.readouterr().out
    saved = tmp_path / "results" / "compare-allreduce-2-ranks.json"
    result = json.loads(saved.read_text())
    assert [item["environment"] for item in result["runs"]] == ["a", "b", "a", "b"]
    assert {item["runs"] for item in result["merged"]} == {2} and saved.with_suffix(".png").exists()
    created.clear()
    with pytest.raises(KeyboardInterrupt):
        typed("--resume", "--iterations", "3")
    assert created == ["a", "b", "a"]


def test_an_environment_with_another_hpctrain_is_refused(compare, tmp_path, capfd):
    """It would be measured in place of this one, and nobody would see it."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 123 /somewhere/hpctrain\n")
    python.chmod(0o755)
    with pytest.raises(
        SystemExit, match=r"another hpctrain, /somewhere/hpctrain, than .*PYTHONPATH"
    ):
        compare._check_same_sources(tmp_path)
    python.unlink()
    python.symlink_to(sys.executable)
    compare._check_same_sources(Path(sys.prefix))


@pytest.mark.parametrize("length", [3, 300_000])
def test_a_long_result_is_compressed_to_the_same_bytes_each_time(compare, tmp_path, length):
    path, written = tmp_path / "x.json", []
    path.write_text("the result before")
    for _ in range(2):
        file = compare.write_text(path, "é" * length)
        written.append(file.read_bytes())
        assert [*tmp_path.iterdir()] == [file] and compare.read_text(path) == "é" * length
    assert written[0] == written[1] and (file == path) == (length == 3)
    compare.write_text(path, "short")
    assert [*tmp_path.iterdir()] == [path]
