"""The status of jobs: their states in the scheduler, and progress from the files of their runs.

Several jobs may have written into one run, one after the other. The script of each job writes its
id into RUN/.began. If summary.json is newer than this file, it describes that job.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.cluster.schedulers.scheduler import SCHEDULERS, SLURM, Scheduler, scheduler_of
from hpctrain.cluster.slurm.queries import (
    FORGOTTEN_REASON,
    NO_ANSWER,
    JobState,
    numbers_in,
    query_sacct,
)
from hpctrain.cluster.slurm.reasons import explain_end_reason, explain_reason
from hpctrain.cluster.slurm.submit import (
    END_STATES,
    JOBS_FILE,
    POLL_INTERVAL_S,
    read_jobs_file,
)
from hpctrain.core import files
from hpctrain.core.config import toml
from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import run_folder

Row = dict[str, Any]
DAMAGED_STATE = "damaged"
#: How long a shared file system may hide the files of a job that has ended.
FILE_DELAY_S = 10.0
TAIL_BYTES = 1 << 16  #: the part of a job's output that is searched for its last line
#: Exceptions that damaged files cause.
DAMAGE_ERRORS = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError)
METRIC_KEYS = ("step", "epoch", "train_loss", "test_accuracy", "samples_per_s")
RUN_KEYS = ("status", "reason_of_run", "steps", "epochs", *METRIC_KEYS)


@dataclass(frozen=True)
class JobHistory:
    """The jobs that were submitted with one folder, and the script of the latest job."""

    folder: Path
    jobs: tuple[str, ...]  #: ids, the latest last
    script: str = ""  #: empty if the user called sbatch
    scheduler: Scheduler = SLURM

    @property
    def tasks(self) -> dict[str, str]:
        """The folders of a job array's tasks by their numbers; empty for other jobs."""
        if match := re.search(r"^sizes=\(([\d ]+)\)$", self.script, re.M):
            return {str(i): f"nodes-{size}" for i, size in enumerate(match[1].split())}
        return dict(re.findall(r"^(\d+)\) member=(\S+) values=", self.script, re.M))

    def find_run(self, job: str) -> Path:
        """Return the run's folder of `job`, which may be a task of an array.

        The script names this folder; a trial of `hpctrain scale` runs in another than `folder`.
        """
        match = re.search(r"^run=(.*)$", self.script, re.M)
        word = shlex.split(match[1])[0] if match else str(self.folder)
        run = Path(word.removesuffix("/nodes-$nodes").removesuffix("/$member"))
        # A relative path starts at the folder of submission; a missing folder was moved.
        run = run if run.is_absolute() and run.is_dir() else self.folder
        task = job.partition("_")[2]
        return run / self.tasks[task] if self.tasks and task else run


def read_job_history(folder: Path) -> JobHistory:
    """Return the job history of `folder`; a job submitted by hand has written its id there.

    Raises UsageError for damaged ids, or if the script is missing.
    """
    (_, jobs), started_job = read_jobs_file(folder), run_folder.slurm_job(folder)
    if started_job and started_job not in jobs:
        jobs = sorted([*jobs, started_job], key=numbers_in)
    scheduler = scheduler_of(folder)
    script = folder / scheduler.script_file
    is_hand_submitted = not script.exists() and not (folder / JOBS_FILE).exists()
    text = "" if is_hand_submitted else files.read_text(script, files.MIB)
    return JobHistory(folder, tuple(jobs), text, scheduler)


def status_rows(folders: Sequence[Path]) -> list[Row]:
    """Return a row for the latest job of each run, and for each earlier one that has not ended.

    An array has a row per task, including tasks that Slurm has forgotten. A damaged folder has one
    row with the fault. Raises UsageError if no job was submitted with a folder.
    """
    histories = [_read_history(folder) for folder in folders]
    readable_histories = [history for history in histories if isinstance(history, JobHistory)]
    if unsubmitted_folders := [
        history.folder for history in readable_histories if not history.jobs
    ]:
        raise UsageError(
            f"{unsubmitted_folders[0]} holds no {JOBS_FILE}: expected the folder of a run that "
            "`hpctrain slurm submit` or a script of slurm/ made, or of a study of "
            "`hpctrain scale --on slurm`"
        )
    states_by_job = {
        name: scheduler.query_jobs(
            [history.jobs[-1] for history in histories_there],
            [job for history in histories_there for job in history.jobs[:-1]],
        )
        for name, scheduler in SCHEDULERS.items()
        if (histories_there := [h for h in readable_histories if h.scheduler is scheduler])
    }
    rows = (
        _history_rows(history, states_by_job[history.scheduler.name])
        if isinstance(history, JobHistory)
        else [history]
        for history in histories
    )
    return [row for group in rows for row in group]


def _read_history(folder: Path) -> JobHistory | Row:
    try:
        return read_job_history(folder)
    except DAMAGE_ERRORS as error:
        state = JobState("-", DAMAGED_STATE, _error_text(error))
        output = {"log": None, "said": None, "earlier": "", "scheduler": SLURM.name}
        return {**vars(state), **_run_fields(folder), **output}


def _error_text(error: Exception) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)


def _run_fields(run: Path, **values: Any) -> Row:
    return {"run": str(run), **dict.fromkeys(RUN_KEYS), **values}


def _history_rows(history: JobHistory, states_by_job: Mapping[str, list[JobState]]) -> list[Row]:
    """Return the rows of a run; the last row lists the end states of earlier jobs, if known."""
    *earlier_jobs, newest_job = history.jobs
    states = [state for job in earlier_jobs for state in states_by_job[job]]
    listed_states = [state for state in states if state.state not in END_STATES]
    listed_states += _add_forgotten_tasks(newest_job, states_by_job[newest_job], history.tasks)
    ended_jobs = ", ".join(
        f"{state.job} {state.state}" for state in states if state.state in END_STATES
    )
    rows = [_job_row(history, state) for state in listed_states]
    return [*rows[:-1], rows[-1] | {"earlier": ended_jobs}]


def _add_forgotten_tasks(job: str, states: list[JobState], tasks: Iterable[str]) -> list[JobState]:
    """Return `states` and, for an array of `tasks`, the states that the controller has forgotten.

    The controller forgets each task some minutes after its end, while other tasks still run.
    """
    names = [f"{job}_{task}" for task in tasks]
    if not names or states[0].state == NO_ANSWER:
        return states
    state_by_task = {state.job: state for state in states}
    if not state_by_task.keys() >= set(names):
        state_by_task = {state.job: state for state in query_sacct(job)} | state_by_task
    return [state_by_task.get(name, JobState(name, "UNKNOWN", FORGOTTEN_REASON)) for name in names]


def _job_row(history: JobHistory, state: JobState) -> Row:
    """Return the row of a job, or of a task of an array."""
    try:
        run = history.find_run(state.job)
        run_fields = _run_fields(run, **read_run_progress(run, state.job))
    except DAMAGE_ERRORS as error:
        error_text = _error_text(error)
        run_fields = _run_fields(history.folder, status=DAMAGED_STATE, reason_of_run=error_text)
    default_path = history.scheduler.find_log(history.folder, state.job)
    reported_path = Path(state.log) if state.log else default_path
    log_path = next((path for path in (default_path, reported_path) if path.is_file()), None)
    has_failed = state.state in END_STATES and run_fields["status"] != "done"
    output = {
        "log": str(log_path) if log_path else None,
        "said": read_last_line(log_path, state.job) if log_path and has_failed else None,
    }
    scheduler = {"scheduler": history.scheduler.name}
    return {**vars(state), **run_fields, **output, "earlier": "", **scheduler}


def read_run_progress(run: Path, job: str) -> Row:
    """Return the progress from the files of a run; its final status only if `job` wrote it."""
    latest_values: Row = {}
    for row in run_folder.rows(run):  # a row may lack an evaluation
        latest_values |= {key: row[key] for key in METRIC_KEYS if row.get(key) is not None}
    summary = run_folder.read_summary(run) or {}
    path = run / run_folder.RECIPE
    text = files.read_text(path, toml.LIMIT_BYTES) if path.exists() else ""
    table = toml.parse(text, str(path)).get("run")
    options = table if isinstance(table, dict) else {}
    job_summary = summary if run_folder.is_summary_of(run, job) else {}
    return {
        "status": job_summary.get("status"),
        "reason_of_run": job_summary.get("reason"),
        "steps": options.get("steps"),
        "epochs": options.get("epochs"),
        **latest_values,
    }


def read_last_line(log_path: Path, job: str) -> str:
    """Return the last line written by the script of `job` or by hpctrain, else the last line."""
    with files.open_regular(log_path) as file:
        file.seek(max(0, log_path.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    printable_lines = ("".join(filter(str.isprintable, line)).strip() for line in text.splitlines())
    lines = [line for line in printable_lines if line]
    own_lines = [line for line in lines if line.startswith((f"job {job}: ", "hpctrain: "))]
    return (own_lines or lines or [""])[-1]


def wait_for_jobs(folders: Sequence[Path], limit_s: float) -> list[Row]:
    """Return the status of all jobs as soon as all have ended, or after `limit_s`."""
    deadline, pause_s, last_run_s = time.monotonic() + limit_s, 0.5, time.monotonic()
    while True:
        rows, now_s = status_rows(folders), time.monotonic()
        all_ended = all(row["state"] in (*END_STATES, DAMAGED_STATE) for row in rows)
        last_run_s = last_run_s if all_ended else now_s
        # This file system may not show the summary of a completed job yet.
        lacks_summary = any(r["state"] == "COMPLETED" and r["status"] is None for r in rows)
        is_late = now_s - last_run_s < FILE_DELAY_S and lacks_summary
        remaining_s = deadline - now_s
        if remaining_s <= 0 or (all_ended and not is_late):
            return rows
        time.sleep(min(pause_s, remaining_s))
        pause_s = min(2 * pause_s, POLL_INTERVAL_S)


def is_done(row: Row) -> bool:
    """Return whether a run reports that it is done, and its job did not fail in Slurm."""
    return row["status"] == "done" and row["state"] in ("COMPLETED", "UNKNOWN")


def explain_state(row: Row) -> str:
    """Return the reason for a job's state, from its run's summary, its log, or Slurm."""
    if DAMAGED_STATE in (row["state"], row["status"]):
        return f"damaged: {row['reason_of_run'] or row['reason']}"
    if row["state"] in ("RUNNING", "COMPLETING") or is_done(row):
        return ""
    if row["state"] not in END_STATES:
        return explain_reason(row["reason"], row["restarts"])
    reason = row["reason_of_run"] or row["said"] or explain_end_reason(row["reason"])
    code = "" if row["state"] == "CANCELLED" else _describe_exit_code(row["exit_code"])
    return "; ".join(part for part in (reason, code, row["log"]) if part)


def _describe_exit_code(exit_code: str) -> str:
    """Return a description of Slurm's CODE:SIGNAL for the end of a script; "" for success."""
    code, _, signal = exit_code.partition(":")
    if signal not in ("", "0"):
        return f"signal {signal}"
    return "" if code in ("", "0") else f"exit code {code}"
