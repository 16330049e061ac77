"""Loggers as users call them: in recipes, in loops of their own, and from the login node."""

from __future__ import annotations

import json
import os
from importlib import util

import numpy as np
import pytest
import trackers
from click.testing import CliRunner

import hpctrain as ht
from hpctrain.cli import hpctrain
from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.core.run_files.folder_lock import lock_folder
from hpctrain.training import recipe, runs
from hpctrain.training.loggers import LOGGERS, loggers, to_mlflow
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

HERE = ["csv", "tensorboard"]  #: that leave no process and no thread behind


def test_a_recipe_names_loggers_as_a_list_or_a_text():
    names = {
        "log.to=csv": ["csv"],
        "log.to=csv, wandb": ["csv", "wandb"],
        'log.to=["mlflow","csv","csv"]': ["mlflow", "csv"],
        "log.to=[]": [],
    }
    for setting, expected in names.items():
        log = recipe.load("digits", [setting]).log
        assert log.names == expected and log.names == [*dict.fromkeys(log.to)]
    with pytest.raises(UsageError, match="'tensorbord'; did you mean 'tensorboard'"):
        recipe.load("digits", ["log.to=csv,tensorbord"])
    with pytest.raises(UsageError, match=r"unknown key in \[log\]: 'too'"):
        recipe.load("digits", ["log.too=csv"])


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_reported_before_training(kind, monkeypatch, tmp_path):
    find = util.find_spec
    missing = {"mlflow": "alembic"}.get(kind, kind)
    monkeypatch.setattr(loggers, "find_spec", lambda name: None if name == missing else find(name))
    spec = recipe.load("digits", [f"log.to={kind}"])

    def body(link):
        with pytest.raises(UsageError) as error:
            runs.train(spec, over_threads(link), tmp_path / "run", False)
        return str(error.value)

    text = f"logger '{kind}' needs {missing}; run: pip install 'hpctrain[{kind}]'"
    assert run_ranks(2, body) == [text, text]
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="pip install"):
        LOGGERS[kind]()


def test_a_folder_with_the_name_of_a_package_is_no_package(monkeypatch, tmp_path):
    (tmp_path / "nothing_of_that_name").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="needs nothing_of_that_name"):
        loggers.require("mine", ["nothing_of_that_name"])


@pytest.mark.parametrize("kind", HERE)
def test_a_loop_that_goes_back_and_starts_again_is_one_curve(kind, tmp_path):
    logger = LOGGERS[kind](tmp_path / "run", config={"rate": 0.5})
    for step in [1, 2, 3, 4, 2, 3]:  # the loop has lost steps 2 to 4
        logger.log({"loss": step / 2}, step)
        logger.log({"extra": step}, step)
    logger.close()
    with LOGGERS[kind](tmp_path / "run", config={"rate": 0.25}) as again:
        for step in np.arange(3, 6):
            again.log({"loss": step / 4}, step)
    contents = trackers.read(kind, tmp_path / "run")
    steps = {1: 0.5, 2: 1.0, 3: 0.75, 4: 1.0, 5: 1.25}
    assert contents.values["loss"] == [*steps.items()]
    assert contents.values["extra"] == [(1, 1.0), (2, 2.0)]
    assert contents.config["rate"] == "0.25"


def test_only_the_first_rank_of_a_loop_writes(monkeypatch, tmp_path):
    class Second:
        rank, size, hosts = 1, 2, ("a", "a")

    monkeypatch.setattr(loggers, "current_world", Second)
    logger = ht.loggers.CSV(tmp_path / "run")
    logger.log({"loss": 1.0}, 1)
    assert logger.close() == {}
    assert not (tmp_path / "run").exists()
    Second.rank = 0  # rank 0 was lost
    logger.log({"loss": 1.0}, 2)
    assert logger.close()["rows"] == 1
    assert trackers.read("csv", tmp_path / "run").config["job.world_size"] == "2"


def make_run(folder, steps):
    """Write the files of a run of `steps` rows, as a job would."""
    rows = [
        {"step": n, "train_loss": 1 / n, "test_loss": None if n % 2 else n, "wall_s": 1.0}
        for n in steps
    ]
    folder.mkdir(exist_ok=True)
    text = '[run]\nname = "mine"\n\n[log]\nto = "mlflow"\n'
    run_folder.write_recipe(folder, text)
    run_folder.append_row(folder, *rows)
    return rows


def invoke(*words):
    return CliRunner().invoke(hpctrain, [*map(str, words)], catch_exceptions=True)


@pytest.mark.parametrize("kind", HERE)
def test_export_makes_the_files_and_brings_them_up_to_date(kind, tmp_path):
    run = tmp_path / "run"
    make_run(run, range(1, 6))
    for _ in range(2):
        assert invoke("runs", "export", "--to", kind, run).exit_code == 0
        contents = trackers.read(kind, run)
        assert [step for step, _ in contents.values["train_loss"]] == [1, 2, 3, 4, 5]
        assert contents.values["test_loss"] == [(2, 2.0), (4, 4.0)]
        assert contents.config["run.name"] == "mine"
    run_folder.cut_rows(run, 3)  # the run was resumed
    run_folder.append_row(run, {"step": 5, "train_loss": 7.0})
    run_folder.write_summary(run, {"status": "done", "world_size": 3})
    assert invoke("follow", "--to", kind, run).exit_code == 0
    contents = trackers.read(kind, run)
    assert contents.values["train_loss"][3:] == [(5, 7.0)]
    assert contents.config["job.world_size"] == "3"
    assert contents.summary["status"] == "done"


REFUSED = {
    "no run": (["--to", "csv", "nowhere"], "nowhere holds no run"),
    "unknown": (["--to", "wandbb", "run"], "unknown logger 'wandbb'; did you mean 'wandb'?"),
    "unknown of two": (["--to", "csv, wandbb", "run"], "unknown logger 'wandbb'; did you mean"),
    "no rows": (["--to", "csv", "empty"], "expected rows in metrics.jsonl"),
    "no room": (["--to", "csv", "full"], "csv cannot be written: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_export_refuses(case, tmp_path, monkeypatch):
    words, text = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", [1])
    make_run(tmp_path / "full", [1])
    (tmp_path / "full/csv").write_text("a file in place of the folder")
    make_run(tmp_path / "empty", [])
    result = invoke("runs", "export", *words)
    assert isinstance(result.exception, UsageError) and text in str(result.exception)


def end_by_error(run):
    with pytest.raises(ZeroDivisionError), ht.loggers.CSV(run) as logger:
        logger.log({"x": 1 / 1}, 1)
        logger.log({"x": 1 / 0}, 2)


def end_by_export(run):
    make_run(run, [1])
    assert invoke("runs", "export", "--to", "csv", run).exit_code == 0


def end_by_export_meanwhile(run):
    run.mkdir()
    lock = lock_folder(run)
    end_by_export(run)
    os.close(lock)


#: how a log ends, its status, and MLflow's
ENDS = {
    "an error": (end_by_error, "failed", "FAILED"),
    "killed": (end_by_export, "killed", "KILLED"),
    "running": (end_by_export_meanwhile, "running", "RUNNING"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_log_that_ends_before_its_run_is_not_finished(end, tmp_path):
    act, status, in_mlflow = ENDS[end]
    act(tmp_path / "run")
    summary = trackers.read("csv", tmp_path / "run").summary
    assert summary.get("status") == status
    assert to_mlflow.end_status(summary) == in_mlflow


def test_export_is_refused_where_the_running_job_writes(tmp_path):
    def export():
        return str(invoke("runs", "export", "--to", "csv", tmp_path).exception)

    make_run(tmp_path, [1])
    lock = lock_folder(tmp_path)
    assert [export(), export()] == ["None", "None"]  # the second finds what the first has made
    with ht.loggers.CSV(tmp_path) as logger:
        logger.log({"loss": 1.0}, 1)
        assert "its job runs, and writes to csv itself" in export()
    os.close(lock)
    assert export() == "None"


def test_follow_sees_rows_that_a_resumed_run_replaces(tmp_path):
    from hpctrain.tools.report import history
    from hpctrain.tools.report.export import Export

    run, looks = tmp_path / "run", iter(range(4))
    make_run(run, [1, 2, 3, 4])

    def wait(seconds):
        look = next(looks)
        if look == 0:  # killed, resumed at step 2
            run_folder.cut_rows(run, 2)
            run_folder.append_row(run, {"step": 3, "train_loss": 9.0})
        if look == 1:
            run_folder.append_row(run, {"step": 4, "train_loss": 9.5})
            run_folder.write_summary(run, {"status": "done", "exit_code": 0, "world_size": 2})

    export = Export(run, "csv")
    export.end(history.follow(run, wait, export.update))
    contents = trackers.read("csv", run)
    assert contents.values["train_loss"] == [(1, 1.0), (2, 0.5), (3, 9.0), (4, 9.5)]
    assert contents.config["job.world_size"] == "2"  # known at the end alone


def test_runs_lists_without_a_subcommand(tmp_path):
    make_run(tmp_path / "run", [1])
    assert invoke("runs", "export", "--to", "csv", tmp_path / "run").exit_code == 0
    assert len(json.loads(invoke("runs", tmp_path / "run", "--json").stdout)) == 1
    texts = {invoke("runs", *words, tmp_path, "--json").stdout for words in ([], ["list"])}
    (text,) = texts
    assert [entry["recipe"] for entry in json.loads(text)] == ["mine"]
    assert "export" in invoke("runs", "--help").stdout
