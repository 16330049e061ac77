"""A short campaign of faults, a long one with --full, and planted errors for the oracle."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
from ranks import run_on

from hpctrain.core.run_files import run_folder
from hpctrain.tools.chaos import campaign, case, draw, hosts, oracle, regimes, scope
from hpctrain.training import recipe, runs

LOCAL = Path(__file__).parent
NO_NAMESPACES = scope.unavailable()
isolated = pytest.mark.skipif(bool(NO_NAMESPACES), reason=NO_NAMESPACES)
LONG = campaign.load(LOCAL / "long.toml")
SHORT = (LOCAL / "short.jsonl").read_text().splitlines(keepends=True)


def chaos(*words: object) -> list[dict]:
    """Run `hpctrain chaos WORDS`, which must return 0; return the results."""
    file = words[words.index("--results") + 1]
    line = [sys.executable, "-m", "hpctrain", "chaos", *map(str, words)]
    ended = subprocess.run(line, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(row) for row in Path(file).read_text().splitlines()[1:]]


@pytest.mark.sample(2)
@pytest.mark.processes
@pytest.mark.either
@isolated
@pytest.mark.parametrize("line", SHORT[::-1], ids=range(len(SHORT))[::-1])
def test_a_case_of_a_short_campaign(tmp_path, line):
    """Cases picked by hand: each line is a campaign's file."""
    file = tmp_path / "case.jsonl"
    file.write_text(line)
    (result,) = chaos(file, "--results", tmp_path / "results.jsonl")
    assert result["verdict"] == "passed"


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.timeout(7200)
@isolated
def test_a_long_campaign(tmp_path):
    words = ["--seed", random.randrange(10**6), "--workers", 2]
    chaos(LOCAL / "long.toml", *words, "--results", tmp_path / "results.jsonl")


def test_a_case_is_a_function_of_campaign_and_number():
    cases = [draw.draw_case(LONG, index) for index in range(300)]
    assert [draw.draw_case(LONG, index) for index in range(300)] == cases
    assert [case.read(json.dumps(asdict(item))) for item in cases] == cases
    other = campaign.load(LOCAL / "long.toml", {"seed": 16})
    assert draw.draw_case(other, 0) != cases[0]
    assert {item.engine for item in cases} == set(regimes.REGIMES)
    assert {fault.kind for item in cases for fault in item.faults} == {"signal", "disk", "file"}


@pytest.mark.sample(10)
@pytest.mark.parametrize("engine", regimes.REGIMES)
def test_each_recipe_fits_its_ranks(engine):
    regime = regimes.REGIMES[engine]
    drawn = [item for i in range(300) if (item := draw.draw_case(LONG, i)).engine == engine]
    assert {item.ranks for item in drawn} <= {*range(regime.smallest, regime.largest + 1)}
    for item in drawn:
        recipe.check({**item.recipe, "data": {"kind": "digits"}}).must_fit(item.ranks)


# Ten files are written, one after the other, by `python -c WRITES FOLDER`.
WRITES = """
import os, sys
for i in range(10):
    try:
        file = os.open(f"{sys.argv[1]}/.aside", os.O_WRONLY | os.O_CREAT)
        n = os.write(file, b"12345678")
        os.fsync(file)
        os.close(file)
        os.rename(f"{sys.argv[1]}/.aside", f"{sys.argv[1]}/{i}-{n}")
    except OSError as error:
        print(i, error.strerror)
"""
ALL = [f"{i}-8" for i in range(10)]
# The fault -> the program's exit code and output, the files that lie there afterwards
DISKS = {
    "an error": (("write", 4, "EIO", False), 0, "3 Input/output error", ALL[:3] + ALL[4:]),
    "one that stays": (("rename", 9, "EROFS", True), 0,
        "8 Read-only file system|9 Read-only file system", [*ALL[:8], ".aside"]),
    "any operation": (("any", 7, "ENOSPC", False), 0, "1 No space left on device",
        [ALL[0], *ALL[2:]]),
    "half a write": (("write", 2, "short", False), 0, "", [ALL[0], "1-4", *ALL[2:]]),
    "half a write, then a full disk": (("write", 9, "short", True), 0,
        "9 No space left on device", [*ALL[:8], "8-4", ".aside"]),
    "torn": (("write", 1, "torn", False), -9, "", [".aside"]),
    "killed before": (("rename", 2, "kill", False), -9, "", [ALL[0], ".aside"]),
    "killed after": (("rename", 2, "after", False), -9, "", ALL[:2]),
    "another rank": (("write", 4, "EIO", False, 1), 0, "", ALL),
}  # fmt: skip


@pytest.mark.parametrize("name", DISKS)
def test_a_failing_disk(tmp_path, name):
    (operation, number, effect, stays, *rank), code, message, files = DISKS[name]
    fault = case.FailingFile(*(rank or [0]), operation, number, effect, stays)
    folder, report = tmp_path / "run", tmp_path / "report"
    folder.mkdir()
    environ = hosts.environment(fault, hosts.build(tmp_path), folder, report)
    ended = subprocess.run(
        [sys.executable, "-c", WRITES, folder], env={**os.environ, **environ, "PMI_RANK": "0"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (
        code,
        message.replace("|", "\n") + "\n" * bool(message),
    )
    assert sorted(path.name for path in folder.iterdir()) == sorted(files)
    assert report.exists() == (not rank)
    if effect == "torn":
        assert (folder / ".aside").read_bytes() == b"1234"


@pytest.fixture(scope="module")
def completed(tmp_path_factory):
    """A run that has completed, of ranks that are threads."""
    tables = {**regimes.SETTINGS[0], "schema": 1, "data": {"kind": "digits"}}
    tables["model"] = {"kind": "mlp", "widths": [64, 4, 10]}
    tables["run"] = {"name": "campaign", "steps": 20, "interval_steps": 7, "epoch_samples": 390}
    out = tmp_path_factory.mktemp("completed") / "run"
    run_on("threads", 2, partial(runs.train, recipe.check(tables), out=out, resume=False))
    return out


def rewritten(path: Path, change) -> None:
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


# What is done to the folder of the run -> what the oracle says
PLANTED = {
    "nothing": (lambda run: None, []),
    "a lost row": (lambda run: rewritten(run / run_folder.METRICS, lambda rs: rs[:1] + rs[2:]),
        ["metrics.jsonl:2 has steps 13 to 14", "after step 7"]),
    "a row twice": (lambda run: rewritten(run / run_folder.METRICS, lambda rows: rows[:1] + rows),
        ["metrics.jsonl:2 has steps 0 to 7"]),
    "no last row": (lambda run: rewritten(run / run_folder.METRICS, lambda rows: rows[:-1]),
        ["metrics.jsonl ends at step 14 of 20"]),
    "half a row": (lambda run: rewritten(run / run_folder.METRICS, lambda rs: [*rs, rs[0][:9]]),
        ["metrics.jsonl:5 is no JSON"]),
    "a file aside": (lambda run: (run / ".summary.json.17.17").touch(),
        ["files left: ['.summary.json.17.17']"]),
    "half a checkpoint": (lambda run: (run / "checkpoints/.step-00000020.partial").mkdir(),
        ["files left: ['checkpoints/.step-00000020.partial']"]),
    "a damaged checkpoint": (
        lambda run: (run / "checkpoints/step-00000020/part-00001.safetensors").write_bytes(b"x"),
        ["step-00000020 is damaged"]),
    "an old summary": (lambda run: (run / run_folder.SUMMARY).write_text('{"status": "failed"}'),
        ["the summary does not tell of a complete run"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_the_oracle_sees_what_is_wrong_at_the_end(completed, tmp_path, name):
    plant, expected = PLANTED[name]
    run = tmp_path / "run"
    shutil.copytree(completed, run)
    plant(run)
    complete = case.Case(0, 0, 2, "allreduce", {"run": {"steps": 20}}, "launch")
    problems = [*oracle.problems_at_end(complete, run, hung=False)]
    assert bool(problems) == bool(expected), problems
    for text in expected:
        assert any(text in problem for problem in problems), problems
