"""slurm status: the states of jobs as tables, on a simulated Slurm with a file per job."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from scripts import fake

from hpctrain.cli import hpctrain
from hpctrain.cluster.jobs import job_status
from hpctrain.core.run_files import run_folder

JOB = (
    "JobId={} JobState={} Reason={} Restarts={} RunTime=00:01:02 ExitCode={} NodeList=n1 StdOut={}"
)
SCONTROL = """echo $4 >>asked
[ ! -e away ] || { cat away >&2; exit 1; }
cat "known/$4" 2>/dev/null || { echo 'Invalid job id specified' >&2; exit 1; }"""


@pytest.fixture(autouse=True)
def slurm(tmp_path, monkeypatch):
    """Make a Slurm of which known/JOB is what it says of a job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin:/usr/bin")
    fake(tmp_path, "scontrol", SCONTROL)
    fake(tmp_path, "sacct", "exit 1")
    Path("known").mkdir()


def job(number, state, reason="None", restarts=0, code="0:0", out="/no"):
    Path("known", str(number)).write_text(JOB.format(number, state, reason, restarts, code, out))


def run(folder, *jobs, began="", **summary):
    """Make a run as its jobs leave it; who began last has written the summary, if there is one."""
    path = Path(folder)
    path.mkdir(parents=True)
    if jobs:
        (path / "job.sbatch").write_text(f"run={folder}\n")
        run_folder.write_json(path / "jobs.json", {"jobs": jobs})
    if began:
        (path / ".began").write_text(f"{began}\n")
    if summary:
        run_folder.append_row(path, {"step": 12, "epoch": 1, "train_loss": 0.5})
        run_folder.write_recipe(path, "[run]\nsteps = 12\n")
        run_folder.write_summary(path, summary)
    return path


def told(*words):
    """Return what `hpctrain slurm status WORDS` prints, and its exit code."""
    result = CliRunner().invoke(hpctrain, ["slurm", "status", *words])
    return result.output, result.exit_code


def rows(*words):
    return json.loads(told("--json", *words)[0])


# state of job 18, who began last, is the summary older than that -> what counts of it, exit code
ENDS = {
    "done": ("COMPLETED", 18, False, "done", 0),
    "forgotten": (None, 18, False, "done", 0),
    "Slurm says otherwise": ("FAILED", 18, False, "done", 1),
    "it waits after one that was done": ("PENDING", 17, False, None, 1),
    "it was cancelled there": ("CANCELLED", 17, False, None, 1),
    "it runs, and has not said anything yet": ("RUNNING", 18, True, None, 1),
    "it failed before it trained": ("FAILED", 18, True, None, 1),
    "it never began": ("NODE_FAIL", 17, False, None, 1),
    "forgotten, and never began": (None, 17, False, None, 1),
    "nobody says who began": ("COMPLETED", "", False, None, 1),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_summary_tells_of_the_job_that_wrote_it(case):
    state, began, older, status, code = ENDS[case]
    path = run("runs/x", 17, 18, began=began, status="done", reason="said by it")
    job(17, "COMPLETED")
    if state:
        job(18, state)
    if older:
        os.utime(path / "summary.json", ns=(1, 1))
    (row,) = rows("runs/x")
    assert (row["status"], row["job"], row["earlier"]) == (status, "18", "17 COMPLETED")
    text, ended = told("--wait", "0.01", "runs/x")
    assert ended == code
    assert ("said by it" in text) == (case == "Slurm says otherwise")
    assert "18: earlier jobs in this folder: 17 COMPLETED" in text


def test_a_summary_that_a_file_system_shows_late_is_waited_for(monkeypatch):
    path = run("runs/x", 17, began=17)
    job(17, "COMPLETED")

    def later(seconds):
        run_folder.write_summary(path, {"status": "done"})

    monkeypatch.setattr(job_status.time, "sleep", later)
    assert told("--wait", "60")[1] == 0


def test_of_two_jobs_that_have_not_ended_each_has_its_own_words():
    run("runs/x", 17, 18, began=17, status="stopped", reason="stopped at step 12")
    job(17, "RUNNING")
    job(18, "PENDING", "Dependency")
    assert [(row["job"], row["status"]) for row in rows("runs/x")] == [
        ("17", "stopped"), ("18", None),
    ]  # fmt: skip


AWAY = {
    "slurm_load_jobs error: Unable to contact slurm controller (connect failure)": 1,
    "slurm_load_jobs error: Socket timed out on send/recv operation": 1,
    "slurm_load_jobs error: Something about this job alone": 3,
}


@pytest.mark.parametrize("message", AWAY)
def test_a_controller_that_is_away_is_asked_once_and_told_of_once(message):
    for number in (17, 18, 19):
        run(f"runs/{number}", number)
    Path("away").write_text(message)
    text, code = told()
    assert code == 1
    assert len(Path("asked").read_text().split()) == AWAY[message]
    assert f"17, 18, 19: scontrol does not show jobs: {message}" in text
    assert text.count("scontrol") == 1
    assert [row["state"] for row in rows()] == ["NO ANSWER"] * 3


LOG = """job 17: stopped at step 12; back into the queue for restart 1 of 20
hpctrain: rank 1: disk full
\x1b[2Jsrun: error: n2: task 1: Exited with exit code 1
"""
# state, reason, code, log, reason of the run -> what is said below the table
ENDED = {
    ("FAILED", "NonZeroExitCode", "1:0", LOG, ""): (
        "hpctrain: rank 1: disk full; exit code 1; runs/x/slurm-17.out"
    ),
    ("FAILED", "NonZeroExitCode", "75:0", LOG + "job 17: restarted 20 times", ""): (
        "job 17: restarted 20 times; exit code 75; runs/x/slurm-17.out"
    ),
    ("FAILED", "NonZeroExitCode", "127:0", "srun: not found\n\n", ""): (
        "srun: not found; exit code 127; runs/x/slurm-17.out"
    ),
    ("FAILED", "NonZeroExitCode", "1:0", LOG, "rank 3: lost"): (
        "rank 3: lost; exit code 1; runs/x/slurm-17.out"
    ),
    ("FAILED", "JobLaunchFailure", "0:53", None, ""): (
        "JobLaunchFailure: its nodes could not start it: a file system, or the nodes themselves; "
        "signal 53"
    ),
    ("FAILED", "NonZeroExitCode", "1:0", None, ""): (
        "NonZeroExitCode: its script ended with an error; exit code 1"
    ),
    ("TIMEOUT", "TimeLimit", "0:0", "", ""): "TimeLimit: its time was over; runs/x/slurm-17.out",
    ("FAILED", "BeginTime", "1:0", None, ""): "exit code 1",
    ("CANCELLED", "BeginTime", "0:15", None, ""): None,
    ("CANCELLED", "JobHeldUser", "0:0", None, ""): None,
    ("CANCELLED", "DependencyNeverSatisfied", "0:0", None, ""): (
        "DependencyNeverSatisfied: the job on which it depends failed"
    ),
    ("RUNNING", "BeginTime", "0:0", LOG, ""): None,
    ("PENDING", "BeginTime", "0:0", None, ""): "BeginTime: its start time has not come yet",
}


@pytest.mark.parametrize("case", ENDED, ids=str)
def test_why_a_job_is_where_it_is(case):
    state, reason, code, log, of_run = case
    path = run("runs/x", 17, began=17, status="failed", reason=of_run)
    job(17, state, reason, code=code)
    if log is not None:
        (path / "slurm-17.out").write_text(log)
    below = [line for line in told()[0].splitlines() if line.startswith("17: ")]
    assert below == ([f"17: {ENDED[case]}"] if ENDED[case] else [])
    (row,) = rows()
    assert row["log"] == (None if log is None else "runs/x/slurm-17.out")
    assert row["exit_code"] == code


def test_after_a_requeue_a_job_waits_for_another_reason():
    run("runs/x", 17)
    job(17, "PENDING", "BeginTime", restarts=1)
    assert "17: BeginTime: Slurm waits two minutes after a requeue" in told()[0]


# what is damaged -> the state of its row, and what is said of it
DAMAGE = {
    ("jobs.json", '{"jobs": [17'): ("damaged", "runs/b/jobs.json is damaged: expected"),
    ("job.sbatch", None): ("damaged", "job.sbatch: expected a file, seen nothing"),
    ("recipe.toml", "[run\nste"): ("COMPLETED", "runs/b/recipe.toml is not TOML: Expected"),
    ("summary.json", '{"status'): ("COMPLETED", "runs/b/summary.json, column 2: expected JSON"),
    ("job.sbatch", "run='a"): ("COMPLETED", "No closing quotation"),
}


@pytest.mark.parametrize("case", DAMAGE, ids=str)
def test_a_damaged_folder_is_a_row_beside_the_others(case):
    (name, text), (state, message) = case, DAMAGE[case]
    for folder, number in (("a", 16), ("b", 17), ("c", 18)):
        path = run(f"runs/{folder}", number, began=number, status="done")
        job(number, "COMPLETED")
        if folder == "b":
            (path / name).unlink()
        if folder == "b" and text is not None:
            (path / name).write_text(text)
    outcome = {row["run"]: (row["state"], row["status"]) for row in rows()}
    damaged = (state, None if state == "damaged" else "damaged")
    assert outcome == {
        "runs/a": ("COMPLETED", "done"), "runs/b": damaged, "runs/c": ("COMPLETED", "done"),
    }  # fmt: skip
    text, code = told("--wait", "9")
    assert code == 1
    assert ": damaged: " in text
    assert message in text


def test_the_newest_job_comes_last():
    for folder, number in (("b", 9), ("c", 101), ("a", 20)):
        run(f"runs/{folder}", number)
        job(number, "PENDING", "Priority")
    assert [row["job"] for row in rows()] == ["9", "20", "101"]
    assert [row["job"] for row in rows("runs/c", "runs/b")] == ["101", "9"]
    assert "9, 20, 101: Priority: other jobs come first" in told()[0]


def test_runs_of_scripts_that_were_given_to_sbatch_by_hand_are_found():
    """They keep no jobs.json: what the script has left in the folder of the run says who it is."""
    run("runs/digits-17", began=17, status="done")
    for size, task, status in ((1, 0, "done"), (2, 1, "failed")):
        run(f"runs/digits-18/nodes-{size}", began=f"18_{task}", status=status)
    job(17, "COMPLETED")
    Path("known/18_1").write_text(
        JOB.format("19 ArrayJobId=18 ArrayTaskId=1", "FAILED", "None", 0, "1:0", "a log/18_1.out")
    )
    Path("a log").mkdir()
    Path("a log/18_1.out").write_text("job 18_1: ranks were lost")
    for words in ((), ("runs/digits-17", "runs/digits-18")):
        outcome = [(row["job"], row["state"], row["status"]) for row in rows(*words)]
        assert outcome == [
            ("17", "COMPLETED", "done"), ("18_0", "UNKNOWN", "done"), ("18_1", "FAILED", "failed"),
        ]  # fmt: skip
    assert "18_1: job 18_1: ranks were lost; exit code 1; a log/18_1.out" in told()[0]
    assert told("--wait", "9", "runs/digits-17")[1] == 0
