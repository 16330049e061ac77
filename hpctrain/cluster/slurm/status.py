"""The status of jobs: their state in Slurm, and the progress in the files of their runs.

Several jobs may have written into one run, one after the other. The script of each leaves its id in
RUN/.began, so summary.json describes that job if it is newer, and no other.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.cluster.slurm.queries import NO_ANSWER, NO_LONGER_KNOWN, JobState, from_sacct
from hpctrain.cluster.slurm.reasons import explain, explain_end
from hpctrain.cluster.slurm.submit import END_STATES, JOBS, POLL_S, SCRIPT, job_states, jobs_of
from hpctrain.config import toml
from hpctrain.core import files
from hpctrain.core.errors import UsageError
from hpctrain.run_files import run_folder

Row = dict[str, Any]
DAMAGED = "damaged"
LATE_S = 10.0  #: a shared file system may show the files of a job that has ended so much later
TAIL_BYTES = 1 << 16  #: of a job's output
FAULTS = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError)  #: of damaged files
OF_ROWS = ("step", "epoch", "train_loss", "test_accuracy", "samples_per_s")
OF_RUN = ("status", "reason_of_run", "steps", "epochs", *OF_ROWS)


@dataclass(frozen=True)
class JobHistory:
    """The jobs submitted from a folder, and the script of the latest."""

    folder: Path
    jobs: tuple[str, ...]  #: the latest last
    script: str = ""  #: empty for one that was given to sbatch by hand

    @property
    def sizes(self) -> list[str]:
        """The numbers of nodes of the tasks of a job array; empty for another job."""
        match = re.search(r"^sizes=\(([\d ]+)\)$", self.script, re.M)
        return match[1].split() if match else []

    def run(self, job: str) -> Path:
        """Return the folder of the run of `job`, which may be a task of an array.

        The script names it; for a trial of `hpctrain scale` it is not `folder`.
        """
        match = re.search(r"^run=(.*)$", self.script, re.M)
        run = Path(shlex.split(match[1])[0].removesuffix("/nodes-$nodes")) if match else self.folder
        # seen from the folder of submission; not there where it was moved
        run = run if run.is_absolute() and run.is_dir() else self.folder
        task = job.partition("_")[2]
        return run / f"nodes-{self.sizes[int(task)]}" if self.sizes and task else run


def job_history(folder: Path) -> JobHistory:
    """Return the job history of `folder`; a job submitted by hand has left its id there.

    Raises UsageError for damaged ids, and OSError where the script is gone.
    """
    jobs, started = [str(job) for job in jobs_of(folder)], run_folder.slurm_job(folder)
    if started and started not in jobs:
        jobs = sorted([*jobs, started], key=_numbers)
    script = folder / SCRIPT
    by_hand = not script.exists() and not (folder / JOBS).exists()
    return JobHistory(folder, tuple(jobs), "" if by_hand else script.read_text())


def _numbers(job: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", job)]


def status(folders: Sequence[Path]) -> list[Row]:
    """Return a row for the latest job of each run, and for each earlier one that has not ended.

    An array has a row per task, also for tasks that Slurm has forgotten; a damaged folder has one
    that says so. Raises UsageError where no job was submitted from a folder.
    """
    histories = [_history_or_row(folder) for folder in folders]
    readable = [history for history in histories if isinstance(history, JobHistory)]
    if empty := [history.folder for history in readable if not history.jobs]:
        raise UsageError(
            f"{empty[0]} holds no {JOBS}: expected the folder of a run that `hpctrain slurm "
            "submit` or a script of slurm/ made, or of a study of `hpctrain scale --on slurm`"
        )
    states_of = job_states(
        [history.jobs[-1] for history in readable],
        [job for history in readable for job in history.jobs[:-1]],
    )
    rows = (
        _rows(history, states_of) if isinstance(history, JobHistory) else [history]
        for history in histories
    )
    return [row for group in rows for row in group]


def _history_or_row(folder: Path) -> JobHistory | Row:
    try:
        return job_history(folder)
    except FAULTS as error:
        state = JobState("-", DAMAGED, _fault(error))
        return {**vars(state), **_of_run(folder), "log": None, "said": None, "earlier": ""}


def _fault(error: Exception) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)


def _of_run(run: Path, **values: Any) -> Row:
    return {"run": str(run), **dict.fromkeys(OF_RUN), **values}


def _rows(history: JobHistory, states_of: Mapping[str, list[JobState]]) -> list[Row]:
    """Return the rows of a run; the last lists how earlier jobs ended, if Slurm knows."""
    *earlier_jobs, newest_job = history.jobs
    states = [state for job in earlier_jobs for state in states_of[job]]
    listed = [state for state in states if state.state not in END_STATES]
    listed += _all_tasks(newest_job, states_of[newest_job], len(history.sizes))
    earlier = ", ".join(
        f"{state.job} {state.state}" for state in states if state.state in END_STATES
    )
    rows = [_row(history, state) for state in listed]
    return [*rows[:-1], rows[-1] | {"earlier": earlier}]


def _all_tasks(job: str, states: list[JobState], tasks: int) -> list[JobState]:
    """Return `states`, for an array of `tasks` also those that the controller has forgotten.

    It forgets each task some minutes after its end, while others go on.
    """
    if not tasks or states[0].state == NO_ANSWER:
        return states
    names = [f"{job}_{task}" for task in range(tasks)]
    by_task = {state.job: state for state in states}
    if not by_task.keys() >= set(names):
        by_task = {state.job: state for state in from_sacct(job)} | by_task
    return [by_task.get(name, JobState(name, "UNKNOWN", NO_LONGER_KNOWN)) for name in names]


def _row(history: JobHistory, state: JobState) -> Row:
    """Return the row of a job, or of a task of an array."""
    try:
        run = history.run(state.job)
        of_run = _of_run(run, **run_progress(run, state.job))
    except FAULTS as error:
        of_run = _of_run(history.folder, status=DAMAGED, reason_of_run=_fault(error))
    log = _log(history.folder, state)
    failed = state.state in END_STATES and of_run["status"] != "done"
    output = {
        "log": str(log) if log else None,
        "said": last_line(log, state.job) if log and failed else None,
    }
    return {**vars(state), **of_run, **output, "earlier": ""}


def run_progress(run: Path, job: str) -> Row:
    """Return the progress in the files of a run; its end only if that was in `job`."""
    last: Row = {}
    for row in run_folder.rows(run):  # not every one comes with an evaluation
        last |= {key: row[key] for key in OF_ROWS if row.get(key) is not None}
    summary = run_folder.read_summary(run) or {}
    options = _run_options(run)
    own_summary = summary if run_folder.is_summary_of(run, job) else {}
    return {
        "status": own_summary.get("status"),
        "reason_of_run": own_summary.get("reason"),
        "steps": options.get("steps"),
        "epochs": options.get("epochs"),
        **last,
    }


def _run_options(run: Path) -> Row:
    """Return `[run]` of the resolved recipe; empty before training begins."""
    path = run / run_folder.RECIPE
    text = files.read_text(path, toml.LIMIT_BYTES) if path.exists() else ""
    table = toml.parse(text, str(path)).get("run")
    return table if isinstance(table, dict) else {}


def _log(folder: Path, state: JobState) -> Path | None:
    """Return the output file of a job: in `folder`, or where Slurm reports it; None if missing."""
    default = folder / f"slurm-{state.job}.out"
    reported = Path(state.log) if state.log else default
    return next((path for path in (default, reported) if path.is_file()), None)


def last_line(log: Path, job: str) -> str:
    """Return the last line written by the script of `job` or by hpctrain, else the last line."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    printable_lines = (
        "".join(c for c in line if c.isprintable()).strip() for line in text.splitlines()
    )
    lines = [line for line in printable_lines if line]
    own_lines = [line for line in lines if line.startswith((f"job {job}: ", "hpctrain: "))]
    return (own_lines or lines or [""])[-1]


def wait(folders: Sequence[Path], limit_s: float) -> list[Row]:
    """Return the status of all jobs once they have ended, or after `limit_s`."""
    deadline, pause, last_run_s = time.monotonic() + limit_s, 0.5, time.monotonic()
    while True:
        rows, now = status(folders), time.monotonic()
        finished = all(row["state"] in (*END_STATES, DAMAGED) for row in rows)
        last_run_s = last_run_s if finished else now
        may_be_late = now - last_run_s < LATE_S and any(map(_is_late, rows))
        remaining_s = deadline - now
        if remaining_s <= 0 or (finished and not may_be_late):
            return rows
        time.sleep(min(pause, remaining_s))
        pause = min(2 * pause, POLL_S)


def _is_late(row: Row) -> bool:
    """Return whether the summary of a completed job is not visible yet on this file system."""
    return row["state"] == "COMPLETED" and row["status"] is None


def is_done(row: Row) -> bool:
    """Return whether a run reports that it is done, and its job did not fail in Slurm."""
    return row["status"] == "done" and row["state"] in ("COMPLETED", "UNKNOWN")


def meaning(row: Row) -> str:
    """Return the reason for the state of a job: the run's own, else the log's, else Slurm's."""
    if DAMAGED in (row["state"], row["status"]):
        return f"damaged: {row['reason_of_run'] or row['reason']}"
    if row["state"] in ("RUNNING", "COMPLETING") or is_done(row):
        return ""
    if row["state"] not in END_STATES:
        return explain(row["reason"], row["restarts"])
    reason = row["reason_of_run"] or row["said"] or explain_end(row["reason"])
    code = "" if row["state"] == "CANCELLED" else _code(row["exit_code"])
    return "; ".join(part for part in (reason, code, row["log"]) if part)


def _code(exit_code: str) -> str:
    """Return the end of a script in words, from Slurm's CODE:SIGNAL."""
    code, _, signal = exit_code.partition(":")
    if signal not in ("", "0"):
        return f"signal {signal}"
    return "" if code in ("", "0") else f"exit code {code}"
