"""slurm status of scaling studies and job arrays: a line per size, on a simulated Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from scripts import fake

from hpctrain.cli import hpctrain
from hpctrain.cluster.jobs import job_status
from hpctrain.cluster.slurm import submit
from hpctrain.core.run_files import run_folder

ENDED = "JobId={0} JobState=COMPLETED Reason=None RunTime=00:00:09 NodeList=n1"
RUNS = "JobId={0} JobState=RUNNING Reason=None Restarts=1 RunTime=00:00:09 NodeList=n1"
WAITS = "JobId={0} JobState=PENDING Reason=Resources RunTime=00:00:00 NodeList=(null)"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Return a function that lets scontrol say a line of each job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin:/usr/bin")
    monkeypatch.setattr(job_status.time, "sleep", lambda seconds: None)

    def says(lines: dict[int, str]) -> None:
        cases = [f"{job}) echo '{line.format(job)}' ;;" for job, line in lines.items()]
        forgotten = "*) echo Invalid job id >&2; exit 1 ;;"
        fake(tmp_path, "scontrol", "\n".join(["case $4 in", *cases, forgotten, "esac"]))

    return says


def trial(study: Path, size: str, repeat: int, job: int, step: int, status: str = "") -> None:
    """Make the files of a trial as `hpctrain scale` leaves them."""
    run = study.absolute() / "trials" / size / f"repeat-{repeat}"
    saved = run.with_name(f"{run.name}.job")
    saved.mkdir(parents=True)
    (saved / submit.SCRIPT_FILE).write_text(f"run={run}\n")
    run_folder.write_json(saved / submit.JOBS_FILE, {"jobs": [job]})
    if step:
        run.mkdir()
        (run / run_folder.SLURM_JOB).write_text(f"{job}\n")
    make(run, step, status)


def make(run: Path, step: int, status: str = "") -> None:
    """Make a run that is at `step`, where it was evaluated half-way there."""
    if step:
        run.mkdir(parents=True, exist_ok=True)
        run_folder.write_recipe(run, "[run]\nsteps = 220\n")
        early = {"step": step // 2, "epoch": 1, "train_loss": 0.5, "test_accuracy": 0.75}
        for row in (early, early | {"step": step, "train_loss": 0.25, "test_accuracy": None}):
            run_folder.append_row(run, row)
    if status:
        run_folder.write_summary(run, {"status": status})


def told(*words: str) -> tuple[str, int]:
    """Return what `hpctrain slurm status WORDS` prints, and its exit code."""
    result = CliRunner().invoke(hpctrain, ["slurm", "status", *words])
    return result.output, result.exit_code


def lines(text: str) -> list[list[str]]:
    """Return the cells of a table's rows, below its head."""
    rows = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows]


def test_a_study_has_a_line_for_each_size(slurm):
    study = Path("runs/scale-digits")
    trial(study, "2-on-2", 0, 11, 220, "done")
    trial(study, "2-on-2", 1, 13, 110)
    trial(study, "10-on-10", 0, 12, 0)
    slurm({11: ENDED, 12: WAITS, 13: RUNS})
    for words in ((), ("runs/scale-digits",)):
        text, code = told(*words)
        assert code == 0
        assert lines(text) == [
            ["11, 13", "1 COMPLETED, 1 RUNNING", "1", "1 of 2 done", "110 of 220", "0.2500",
             "0.7500", "runs/scale-digits/trials/2-on-2"],
            ["12", "PENDING", "0", "-", "-", "-", "-", "runs/scale-digits/trials/10-on-10"],
        ]  # fmt: skip
        assert "12: Resources: waits for nodes" in text
    rows = json.loads(told("--json")[0])
    assert [(row["job"], row["state"], row["step"]) for row in rows] == [
        ("11", "COMPLETED", 220), ("13", "RUNNING", 110), ("12", "PENDING", None),
    ]  # fmt: skip


def test_waiting_for_a_study(slurm):
    study = Path("study")
    trial(study, "1", 0, 11, 220, "done")
    trial(study, "2", 0, 12, 220)
    slurm({11: ENDED, 12: ENDED})
    assert told("study", "--wait", "0.1")[1] == 1
    run_folder.write_summary(study / "trials/2/repeat-0", {"status": "done"})
    assert told("study", "--wait", "9")[1] == 0


def test_tasks_of_an_array_that_slurm_has_forgotten_keep_their_lines(slurm):
    run = Path("runs/first")
    for size, step, status in ((1, 220, "done"), (2, 110, "")):
        make(run / f"nodes-{size}", step, status)
    (run / submit.SCRIPT_FILE).write_text("run=runs/first/nodes-$nodes\nsizes=(1 2 4 8)\n")
    run_folder.write_json(run / submit.JOBS_FILE, {"jobs": [17]})
    task = "{0} ArrayJobId=17 ArrayTaskId="
    slurm({17: "\n".join(
        [RUNS.replace("{0}", f"{task}1"), WAITS.replace("{0}", f"{task}2-3%1")]
    )})  # fmt: skip
    table = lines(told()[0])
    assert [(row[0], row[1], row[4], row[6], row[7]) for row in table] == [
        ("17_0", "UNKNOWN", "220 of 220", "0.7500", "runs/first/nodes-1"),
        ("17_1", "RUNNING", "110 of 220", "0.7500", "runs/first/nodes-2"),
        ("17_2", "PENDING", "-", "-", "runs/first/nodes-4"),
        ("17_3", "PENDING", "-", "-", "runs/first/nodes-8"),
    ]
    slurm({})
    assert [row[1] for row in lines(told()[0])] == ["UNKNOWN"] * 4
