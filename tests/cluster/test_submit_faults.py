"""slurm submit with faults: a full disk, a slow controller, a folder in use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from scripts import fake

from hpctrain.cli import hpctrain
from hpctrain.cluster.slurm import queries, submit
from hpctrain.core import opening
from hpctrain.core.run_files import run_folder
from hpctrain.training import recipe

SHOW = "echo 'JobId={} JobState={} Reason=None RunTime=00:00:01 NodeList=n1'"


@pytest.fixture(autouse=True)
def slurm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin:/usr/bin")


def told(*words):
    """Return the exit code of `hpctrain slurm submit WORDS`, and what it says; UsageErrors too."""
    result = CliRunner().invoke(hpctrain, ["slurm", "submit", *words], standalone_mode=False)
    if result.exception:
        return result.exception.exit_code, str(result.exception)
    return result.return_value or 0, result.output


def arguments(tmp_path, script="echo 17"):
    fake(tmp_path, "sbatch", f"echo called >>called\n{script}")


def calls():
    path = Path("called")
    return len(path.read_text().split()) if path.exists() else 0


def test_a_full_disk_is_found_before_the_job_is_given_away(tmp_path, monkeypatch):
    arguments(tmp_path)
    Path("kept").mkdir()

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(opening, "create", full)
    code, message = told("digits", "--out", "kept")
    assert (code, message) == (2, "--out kept cannot be written: No space left on device")
    assert calls() == 0
    assert list(Path("kept").iterdir()) == []


def test_a_disk_that_is_full_afterwards_keeps_nobody_from_telling_the_id(tmp_path, monkeypatch):
    arguments(tmp_path)

    def full(path, table):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(submit.run_folder, "write_json", full)
    code, message = told("digits", "--out", "kept")
    assert code == 1
    assert message.startswith(
        "hpctrain: job 17 is submitted, but kept cannot keep its id: No space"
    )
    assert "Traceback" not in message


LATE = {
    "Batch job submission failed: Socket timed out on send/recv operation": True,
    "Batch job submission failed: Zero Bytes were transmitted or received": True,
    "Unable to contact slurm controller (connect failure)": False,
    "invalid partition specified: gold": False,
}


@pytest.mark.parametrize("words", LATE)
def test_an_answer_that_is_late_is_no_refusal(words, tmp_path):
    arguments(tmp_path, f"echo 'sbatch: error: {words}' >&2; exit 1")
    code, message = told("digits", "--job-name", "mine", "--out", "kept")
    assert code == (1 if LATE[words] else 2)
    assert ("the job may still be in the queue" in message) == LATE[words]
    assert ("`squeue --me --name=mine`" in message) == LATE[words]
    assert message.startswith("sbatch refuses the job") != LATE[words]
    assert Path("kept/job.sbatch").exists() == Path("kept").exists() == LATE[words]


def test_an_sbatch_that_does_not_answer_at_all(tmp_path, monkeypatch):
    arguments(tmp_path, "exec sleep 9")
    monkeypatch.setattr(queries, "COMMAND_TIMEOUT_S", 0.1)
    code, message = told("digits", "--out", "kept")
    assert code == 1
    assert "sbatch has not answered within" in message
    assert "may still be in the queue" in message
    assert Path("kept/job.sbatch").exists()


TASK = "17 ArrayJobId=17 ArrayTaskId=0"
# job 17 of this folder, its state, --option dependency -> is another job taken
BUSY = {
    (17, "PENDING", None): False,
    (17, "RUNNING", None): False,
    (17, "RUNNING", "after:17"): False,
    (17, "RUNNING", "afterany:16"): False,
    (17, "RUNNING", "afterany:16:17"): True,
    (17, "PENDING", "singleton"): True,
    (17, "COMPLETED", None): True,
    (17, "FAILED", None): True,
    (TASK, "RUNNING", None): False,
    (TASK, "RUNNING", "afterany:17"): True,
    (TASK, "RUNNING", "afterany:17_0"): True,
    (TASK, "RUNNING", "afterany:17_1:16_0"): False,
}


@pytest.mark.parametrize("case", BUSY, ids=str)
def test_two_jobs_do_not_write_into_one_folder(case, tmp_path):
    shown, state, dependency = case
    arguments(tmp_path)
    assert told("digits", "--out", "a") == (0, "17  a\n")
    fake(tmp_path, "scontrol", SHOW.format(shown, state))
    options = ["--option", f"dependency={dependency}"] if dependency else []
    code, message = told("digits", "--out", "a", *options)
    assert (code == 0) == BUSY[case]
    assert calls() == 1 + BUSY[case]
    if not BUSY[case]:
        assert code == 2
        assert re.search(f"its job 17(_0)? is {state}", message)
        assert "add --option dependency=afterany:17, name another --out, or `scancel 17`" in message


# what is asked for where digits was trained, and whether a checkpoint is there -> what is refused
ONTO = {
    ("digits --epochs 40", True): None,
    ("digits --set run.epochs=40 --engine gossip --nodes 2", True): None,
    ("digits --set optimizer.rate=0.01 --set checkpoint.keep=1", True): None,
    ("digits --set model.dropout=0.5", True): None,
    ("mnist", True): "[model] there",
    ("mnist", False): None,
    ("digits --set model.widths=[64,9,10]", True): "[model] there",
    ("digits --set optimizer.kind=adamw --set optimizer.momentum=", True): "[optimizer] there",
}


@pytest.mark.parametrize("case", ONTO, ids=str)
def test_checkpoints_of_another_recipe_are_not_gone_on_with(case, tmp_path):
    words, saved = case
    arguments(tmp_path)
    rundir_of("a", saved)
    code, message = told(*words.split(), "--out", "a")
    assert (code, calls()) == ((2, 0) if ONTO[case] else (0, 1)), message
    if ONTO[case]:
        assert "--out a holds checkpoints of another recipe: " in message
        assert ONTO[case] in message
        assert "a/recipe.toml" in message


def rundir_of(folder, saved):
    """Make the folder of a run of digits; nothing looks into its checkpoint."""
    path = Path(folder)
    path.mkdir()
    run_folder.write_recipe(path, recipe.load("digits").toml())
    if saved:
        (path / "checkpoints" / "step-00000012").mkdir(parents=True)


def test_epochs_are_those_of_train(tmp_path):
    arguments(tmp_path)
    assert told("digits", "--epochs", "7", "--out", "a")[0] == 0
    assert "train=(hpctrain train digits --epochs 7)" in Path("a/job.sbatch").read_text()
    assert told("digits", "--epochs", "0", "--out", "b")[0] == 2
