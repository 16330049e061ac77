"""A sweep among runs: its row, its members, the best of them."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from hpctrain.cli import hpctrain
from hpctrain.commands.runs import compare, runs
from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import folder_lock, run_folder, sweep_folder
from hpctrain.core.run_files.sweep_folder import Member, SweepFile
from hpctrain.tools.report import history, sweep

RATES = ("0.1", "0.2", "0.3", "0.4", "0.5")
RECIPE = 'schema = 1\n[run]\nname = "digits"\nepochs = 3\n'
#: of the rows of a run: test accuracies, test losses
CURVES = {
    "0.1": ((0.9, 0.8), (0.4, 0.5)),
    "0.2": ((0.7, 0.85), (0.6, 0.2)),
    "0.3": ((0.99,), (0.1,)),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Write a sweep of five: two are done, one is killed, one runs, one waits."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "sweep"
    folder.mkdir(parents=True)
    members = [Member(f"rate={rate}", {"optimizer.rate": rate}) for rate in RATES]
    sweep_folder.write(folder, SweepFile("digits", ["optimizer.rate=" + ",".join(RATES)], members))
    for rate in RATES[:4]:
        write(folder / f"rate={rate}", *CURVES.get(rate, ((), ())), is_done=rate < "0.3")
    lock = folder_lock.lock_folder(folder / "rate=0.4")
    yield folder
    os.close(lock)


def write(run, accuracies, losses, is_done):
    run.mkdir()
    (run / run_folder.RECIPE).write_text(RECIPE)
    for i, (accuracy, loss) in enumerate(zip(accuracies, losses, strict=True), start=1):
        run_folder.append_row(run, {"step": 10 * i, "test_accuracy": accuracy, "test_loss": loss})
    if is_done:
        last = {"test_accuracy": accuracies[-1], "test_loss": losses[-1], "steps": 20}
        run_folder.write_summary(run, {"status": "done", "exit_code": 0, "wall_s": 1.5, **last})


def test_a_sweep_is_a_row_and_its_folder_lists_its_members(folder):
    write(folder.parent / "single", *CURVES["0.1"], is_done=True)
    statuses = ["done", "done", "killed", "running", "waiting"]
    (row,) = (e for e in history.list_runs(folder.parent) if e.members)
    assert row.status == "2 of 5 done, 1 killed, 1 running, 1 waiting"
    assert (row.recipe, row.metric, row.value) == ("digits", "test_accuracy", 0.99)
    assert [entry.status for entry in history.list_runs(folder)] == statuses
    everything = json.loads(CliRunner().invoke(runs, ["--all", "--json"]).stdout)
    assert sorted(e["status"] for e in everything) == sorted([*statuses, "done"])
    assert str(history.find_newest(folder.parent, "digits")).endswith("single")
    assert [e.status for e in history.list_runs(folder / "rate=0.3")] == ["killed"]
    (folder / sweep_folder.SWEEP).write_text('{"recipe": 1}')
    (row,) = (e for e in history.list_runs(folder.parent) if e.status.startswith("damaged"))
    assert "sweep.json: 'recipe'" in row.status


#: what the recipe adds -> metric, the best member, its value, the order
BEST = {
    "": ("test_accuracy", "rate=0.2", 0.85, "32145"),
    '[checkpoint]\nkeep_best = "test_loss"\n': ("test_loss", "rate=0.2", 0.2, "32145"),
    "[early_stop]\npatience = 2\n": ("test_loss", "rate=0.2", 0.2, "32145"),
    '[checkpoint]\nkeep_best = "test_accuracy"\n': ("test_accuracy", "rate=0.1", 0.9, "31245"),
}


@pytest.mark.parametrize("table", BEST)
def test_the_best_member_by_the_metric_of_the_recipe(folder, table):
    """A member that is not done is not the best one."""
    for run in folder.glob("rate=*"):
        (run / run_folder.RECIPE).write_text(RECIPE + table)
    result = sweep.compare(folder)
    metric, name, value, order = BEST[table]
    assert (result.criterion.metric, result.best.name, result.best.value) == (metric, name, value)
    assert "".join(member.name[-1] for member in result.members) == order
    shown = CliRunner().invoke(compare, ["runs/sweep"]).stdout
    words = f"best: {metric.replace('_', ' ')} {value:.4f} with optimizer.rate={name[5:]}"
    assert words in shown and "1.50 s" in shown
    assert json.loads(CliRunner().invoke(compare, ["runs/sweep", "--json"]).stdout)["best"] == name


@pytest.mark.parametrize("command", ["compare runs/sweep/rate=0.1", "follow", "report"])
def test_other_commands_take_a_run(folder, command):
    with pytest.raises(UsageError, match="runs/sweep is a sweep: name one of its runs"):
        CliRunner().invoke(hpctrain, [*command.split(), "runs/sweep"], catch_exceptions=False)


DAMAGED = [
    '{"recipe": "a", "settings": [], "members": []}',
    '{"recipe": "a", "settings": [], "members": [{"name": "../a", "values": {}}]}',
    "{",
    "[]",
]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_list_of_members_is_named(tmp_path, text):
    (tmp_path / sweep_folder.SWEEP).write_text(text)
    with pytest.raises(UsageError, match=r"sweep\.json"):
        sweep.compare(tmp_path)
