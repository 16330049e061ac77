"""Lists, comparisons and live views of runs, read from their files alone."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from browser import painted
from click.testing import CliRunner
from matplotlib import image
from tools.report.test_report import ROWS, row

from hpctrain.commands.runs import compare, runs
from hpctrain.commands.runs import follow as follow_command
from hpctrain.commands.train import train
from hpctrain.core import palette
from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import folder_lock, run_folder
from hpctrain.tools.report import comparison, history
from hpctrain.tools.report.history import POLL_S, SILENT_S, follow
from hpctrain.training import recipe

RECIPE = '[run]\nname = "digits"\nepochs = 3\n[engine]\nkind = "ps-async"\n'
DONE = {"status": "done", "exit_code": 0, "recipe": "digits", "engine": "single", "world_size": 1,
        "steps": 30, "test_accuracy": 0.97, "wall_s": 2.0, "samples_per_s": 5000.0}  # fmt: skip
STOPPED = {"status": "stopped", "exit_code": 75, "reason": "SIGTERM", "recipe": "digits"}


def write_run(folder, rows=ROWS, summary=None, recipe=RECIPE, age=0):
    """Write the files of a run that began `age` seconds ago."""
    folder.mkdir(parents=True)
    run_folder.append_row(folder, *rows)
    if summary is not None:
        run_folder.write_summary(folder, summary)
    if recipe:
        (folder / run_folder.RECIPE).write_text(recipe)
        began = (folder / run_folder.RECIPE).stat().st_mtime - age
        os.utime(folder / run_folder.RECIPE, (began, began))
    return folder


#: name: arguments of write_run; status, engine, ranks, step, metric, value
RUNS = {
    "done": ({"summary": DONE}, ("done", "single", 1, 30, "test_accuracy", 0.97)),
    "stopped": ({"summary": STOPPED}, ("stopped", "ps-async", 2, 30, "train_loss", 1 / 30)),
    "killed": ({}, ("killed", "ps-async", 2, 30, "train_loss", 1 / 30)),
    "no row": ({"rows": []}, ("killed", "ps-async", None, None, None, None)),
    "of a script": ({"summary": DONE, "recipe": ""},
                    ("done", "single", 1, 30, "test_accuracy", 0.97)),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_described_by_its_files(tmp_path, name):
    arguments, expected = RUNS[name]
    entry = history.read_entry(write_run(tmp_path / "run", **arguments))
    assert entry.recipe == ("(Python)" if arguments.get("recipe") == "" else "digits")
    assert (entry.status, entry.engine, entry.ranks, entry.step, entry.metric) == expected[:5]
    assert entry.value == pytest.approx(expected[5])


def test_a_run_is_running_while_its_lock_is_taken(tmp_path):
    run = write_run(tmp_path / "run")
    lock = folder_lock.lock_folder(run)
    assert history.read_entry(run).status == "running"
    os.close(lock)
    assert history.read_entry(run).status == "killed"


def test_the_last_started_run_is_listed_first(tmp_path, monkeypatch):
    write_run(tmp_path / "runs" / "old", summary=DONE, age=100)
    write_run(tmp_path / "runs" / "array" / "nodes-2", age=50)
    damaged = write_run(tmp_path / "runs" / "damaged", age=10)
    (damaged / run_folder.SUMMARY).write_text("{")
    write_run(tmp_path / "runs" / "new", recipe=RECIPE.replace("digits", "other"), age=1)
    (tmp_path / "runs" / "no run").mkdir()
    monkeypatch.chdir(tmp_path)
    printed = CliRunner().invoke(runs, ["--json"], catch_exceptions=False).stdout
    entries = json.loads(printed)
    folders = ["runs/new", "runs/damaged", "runs/array/nodes-2", "runs/old"]
    assert [entry["folder"] for entry in entries] == folders
    assert entries[1]["status"].startswith("damaged: ") and "summary.json" in entries[1]["status"]
    table = CliRunner().invoke(runs, [], catch_exceptions=False).stdout
    assert all(folder in table for folder in folders) and "test accuracy 0.9700" in table
    assert str(history.find_newest(tmp_path / "runs", "digits")).endswith("runs/array/nodes-2")
    for words in (["nothing"], ["runs/no run"]):
        with pytest.raises(UsageError, match="expected the folder of a run, or one that holds"):
            CliRunner().invoke(runs, words, catch_exceptions=False)


def test_runs_are_compared_by_facts_and_recipes(tmp_path):
    first = write_run(tmp_path / "first", summary=DONE)
    second = write_run(tmp_path / "second", recipe=RECIPE.replace("3", "4\nseed = 1"))
    compared = comparison.compare([first, second])
    assert compared["recipes"] == {"run.epochs": [3, 4], "run.seed": [None, 1]}
    facts = compared["runs"]
    assert facts[str(first)]["status"] == "done" and facts[str(first)]["test_accuracy"] == 0.97
    assert facts[str(second)]["steps"] == 30 and "killed" in facts[str(second)]["status"]
    words = [str(first), str(second), "--plot", str(tmp_path / "plot.svg")]
    ended = CliRunner().invoke(compare, words, catch_exceptions=False)
    assert "run.epochs" in ended.stdout and "0.9700" in ended.stdout
    assert f"wrote {tmp_path}/plot.svg" in ended.output
    plot = (tmp_path / "plot.svg").read_text()
    assert plot.count("test accuracy") == 1 and "wall time in training [s]" in plot


def test_keys_with_their_defaults_are_no_differences(tmp_path):
    lines = recipe.load("digits").toml()
    first = write_run(tmp_path / "first", recipe=lines)
    written = lines.replace("[run]", "[run]\nnot_finite = 'stop'\nprefetch = 1")
    second = write_run(tmp_path / "second", recipe=written)
    assert comparison.compare([first, second])["recipes"] == {"run.prefetch": [None, 1]}


def test_a_single_evaluation_is_a_mark_in_the_plot(tmp_path):
    row = {"step": 10, "steps": 10, "since_step": 0, "wall_s": 1.0, "test_loss": 0.5}
    runs = [write_run(tmp_path / name, rows=[row]) for name in "ab"]
    comparison.draw(runs, tmp_path / "plot.png")
    picture = image.imread(tmp_path / "plot.png")
    assert min(painted(picture, color) for color in palette.COLORS[:2]) > 20


def test_a_resumed_run_and_one_from_python_are_marked(tmp_path):
    first = write_run(tmp_path / "first", summary=DONE | {"since_step": 20})
    second = write_run(tmp_path / "second", summary=DONE)
    (second / "recipe.toml").unlink()
    compared = comparison.compare([first, second])
    assert compared["recipes"] == {"recipe": ["digits", "(Python)"]}
    table = CliRunner().invoke(compare, [str(first), str(second)], catch_exceptions=False).stdout
    assert "after step 20" in table
    assert [entry.recipe for entry in history.list_runs(second)] == ["(Python)"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a"], "folders of two or more runs, seen a alone"),
        (["a", "nothing"], "nothing holds no run"),
        (["a", "b", "--plot", "p.xyz"], "--plot p.xyz: "),
        (["b", "b", "--plot", "p.png"], "seen none in b"),
    ],
)
def test_bad_comparisons_are_refused(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", rows=[])
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(compare, words, catch_exceptions=False)


def test_a_run_is_followed_until_its_summary(tmp_path, capsys):
    run = write_run(tmp_path / "run", rows=[row(10, epoch=1, samples_per_s=1e3, total_steps=30)])
    later = iter([
        lambda: run_folder.append_row(run, row(20, epoch=2, samples_per_s=1e3, total_steps=30)),
        lambda: None,
        lambda: run_folder.append_row(run, row(30, epoch=3, samples_per_s=1e3, total_steps=30)),
        lambda: run_folder.write_summary(run, STOPPED),
    ])  # fmt: skip
    assert follow(run, lambda seconds: next(later)()) == STOPPED
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 10/30", "step 20/30", "step 30/30"]
    ended = CliRunner().invoke(follow_command, [str(run)], catch_exceptions=False)
    assert ended.exit_code == 75 and "stopped: SIGTERM\n" in ended.output


def test_a_followed_run_without_lock_may_have_been_killed(tmp_path, caplog):
    run, polls = write_run(tmp_path / "run", rows=[]), []

    def wait(seconds):
        polls.append(seconds)
        if len(polls) > 2 * SILENT_S / POLL_S:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(run, wait)
    assert caplog.text.count("no job holds its lock") == 1


@pytest.mark.either
@pytest.mark.processes
def test_a_run_is_resumed_by_its_folder_or_the_name_of_its_recipe(tmp_path, hpctrain):
    """In one process after another, since each begins MPI."""
    keys = ("--set", "model.widths=[64,8,10]", "--set", "run.interval_steps=6")
    for name in ("first", "second"):
        completed = hpctrain("train", "digits", "--epochs", 1, *keys, "--out", f"runs/{name}",
                        cwd=tmp_path)  # fmt: skip
        assert completed.returncode == 0, completed.stderr
        assert (
            "single, 1 rank of 1 host, on CPU cores, 610 parameters, 128 samples"
            in completed.stderr
        )
    newest = hpctrain("train", "digits", "--epochs", 2, *keys, "--resume", cwd=tmp_path)
    assert newest.returncode == 0 and "resumed at step 12 of 24" in newest.stderr
    named = hpctrain("train", "--epochs", 3, "--resume=runs/first", cwd=tmp_path)
    assert named.returncode == 0 and "resumed at step 12 of 36" in named.stderr
    steps = {n: json.loads((tmp_path / "runs" / n / "summary.json").read_text())["steps"]
             for n in ("first", "second")}  # fmt: skip
    assert steps == {"first": 36, "second": 24}
    shutil.rmtree(tmp_path / "runs")
    refused = hpctrain("train", "digits", "--resume", cwd=tmp_path)
    assert (
        refused.returncode == 2 and "expected a run of recipe 'digits' in runs/" in refused.stderr
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume=a", "--out", "b"], "--resume=a names the folder of the run: leave out --out"),
        (["--resume"], "Missing argument 'RECIPE'"),
        (["digits", "-n", "2", "-q"], "hpctrain launch -n 2 train digits -q"),
        ([], "Missing argument 'RECIPE'"),
    ],
)
def test_bad_resumptions_are_refused(words, message):
    ended = CliRunner().invoke(train, words)
    assert ended.exit_code == 2 and message in ended.output


def test_lost_ranks_are_listed_compared_and_followed(tmp_path, capsys):
    rows = [row(10, samples_per_s=1.0, epoch=1, lost_ranks=[1])]
    losses = {"recoveries": [{"step": 5, "wall_s": 0.5, "ranks": [1], "lost_s": 0.25}],
              "since_step": 0, "lost_s": 0.25, "ettr": 0.875, "spares_used": 1}  # fmt: skip
    hurt = write_run(tmp_path / "hurt", rows, {**DONE, **losses})
    unhurt = write_run(tmp_path / "unhurt", summary={**DONE, "recoveries": [], "ettr": 1.0})
    listed = CliRunner().invoke(runs, [str(tmp_path)]).output
    assert listed.count("done, 1 rank lost") == 1
    assert [entry.lost_ranks for entry in history.list_runs(tmp_path)].count(1) == 1
    words = CliRunner().invoke(compare, [str(hurt), str(unhurt)]).output
    for name, value in (("lost ranks", "1"), ("time without progress", "0.25 s"),
                        ("ETTR", "87.50 %"), ("spares used", "1")):  # fmt: skip
        assert any(name in line and value in line for line in words.splitlines())
    assert "lost ranks" not in CliRunner().invoke(compare, [str(unhurt), str(unhurt)]).output
    assert "1 rank lost, 0.25 s" in CliRunner().invoke(follow_command, [str(hurt)]).output
    follow(hurt)
    assert "lost rank 1" in capsys.readouterr().err
