"""`hpctrain chaos`: results, repeated and resumed cases, and what a case leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.core.errors import UsageError
from hpctrain.tools.chaos import command, oracle, regimes, results, scope
from hpctrain.tools.chaos.case import Case
from hpctrain.tools.chaos.command import Request

# Threads without faults: a case takes half a second.
CAMPAIGN = """
schema = 1
seed = 7
cases = 2
engines = ["ordered"]
ranks = [2]
launchers = ["threads"]
[faults]
count = [0]
kinds = ["kill-rank"]
"""


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "faults.toml"
    path.write_text(CAMPAIGN)
    return path


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_campaign_is_run_listed_resumed_and_repeated(file, tmp_path, capsys):
    assert command.chaos(Request(file, isolate=False)) == 0
    facts, *passed = lines(tmp_path / "faults-results.jsonl")
    assert facts["campaign"]["cores"] == os.cpu_count()
    assert [result["verdict"] for result in passed] == ["passed", "passed"]
    assert all(r["params_sha256"] == r["reference_sha256"] is not None for r in passed)
    assert "2 cases with 0 faults, 0 of them hit, 0 failed" in capsys.readouterr().out

    with pytest.raises(UsageError, match="results of an earlier call: add --resume"):
        command.chaos(Request(file, isolate=False))
    assert command.chaos(Request(file, isolate=False, resume=True, cases=3)) == 0
    assert len(lines(tmp_path / "faults-results.jsonl")) == 4  # two had passed

    assert command.chaos(Request(file, lists=True, cases=4)) == 0
    listed = capsys.readouterr().out
    assert "passed   7/2 ordered x2 threads: no faults" in listed
    assert "not run  7/3 ordered x2 threads: no faults" in listed

    work = tmp_path / "work"
    assert command.chaos(Request(file, (1,), isolate=False, keep=True, work=work)) == 0
    assert (work / "case-7-1" / "disk" / "run" / "summary.json").exists()
    assert len(lines(tmp_path / "faults-results.jsonl")) == 4


@pytest.mark.full
def test_failed_cases_of_results_are_repeated(file, tmp_path, capsys):
    command.chaos(Request(file, isolate=False))
    path = tmp_path / "faults-results.jsonl"
    facts, first, second = lines(path)
    broken = {**second, "verdict": "failed", "problems": ["hung"]}
    path.write_text("\n".join(map(json.dumps, [facts, first, broken])) + "\n")
    assert command.chaos(Request(path, lists=True)) == 1
    assert "hung" in capsys.readouterr().out
    assert [case.index for case in command.choose_cases(Request(path, failed=True))] == [1]
    with pytest.raises(UsageError, match="--case 5: the file has no such case"):
        command.choose_cases(Request(path, (5,)))
    assert command.chaos(Request(path, failed=True, isolate=False)) == 0


def test_a_case_that_raises_has_failed(file, monkeypatch, capfd):
    monkeypatch.setattr(command.runner, "run", lambda *_, **__: 1 / 0)
    assert command.chaos(Request(file, isolate=False)) == 1
    (problem,) = {
        p for r in results.read(Path("faults-results.jsonl")).values() for p in r["problems"]
    }
    assert problem.startswith("the campaign itself failed")
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_rank_of_a_job_is_refused(file, monkeypatch):
    variables = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="this is rank 1 of 2: `hpctrain chaos` starts ranks"):
        command.chaos(Request(file))


def test_processes_are_known_by_their_mark():
    marked = scope.Marked("test-of-marks")
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    environ = {**os.environ, **marked.variables()}
    with subprocess.Popen(sleep, env=environ, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert list(marked.processes()) == [process.pid]
        assert scope.Marked("another").processes() == {}
        scope.kill_all(marked)
        assert process.wait() == -9
    assert scope.wait_for_processes(marked, 1.0)[0] == {}


def test_shared_memory_is_left_if_it_is_new_and_unused(monkeypatch, tmp_path):
    monkeypatch.setattr(scope, "SHARED_MEMORY", tmp_path)  # other runs have files in /dev/shm
    marked, path = scope.Marked("test-of-memory"), scope.SHARED_MEMORY / f"hpctrain-{os.getpid()}"
    with open(path, "w"):
        assert path.name not in marked.shared_memory()
    assert path.name in marked.shared_memory()
    scope.clear(marked)
    assert not path.exists()
    with open(path, "w"):
        pass
    assert path.name not in scope.Marked("later").shared_memory()
    path.unlink()


# engine, steps redone -> whether a committed step was lost
RECOVERIES = [("ring", 0, False), ("ring", 1, True), ("shards", 10, False), ("shards", 11, True)]


@pytest.mark.parametrize("engine, redone, is_lost", RECOVERIES)
def test_a_recovery_that_loses_committed_steps(engine, redone, is_lost, tmp_path):
    case = Case(0, 0, 2, engine, regimes.make_recipe(engine, 0), "elastic")
    recovery = {"step": 30, "ranks": [1], "steps_redone": redone, "spares": 0}
    summary = {"status": "done", "exit_code": 0, "steps": case.steps, "recoveries": [recovery],
               "samples": case.samples_of(case.steps)}  # fmt: skip
    problems = list(oracle.problems_of_recoveries(case, summary))
    assert bool(problems) == is_lost
