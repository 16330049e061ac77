"""Jobs of a scheduler that train: submitted, queried, awaited, cancelled, their output read.

A run is named by its folder; see hpctrain/cluster/slurm/submit.py for its files.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.cluster.jobs import studies, sweeps
from hpctrain.cluster.jobs.job_status import DAMAGED_STATE, Row, status_rows, wait_for_jobs
from hpctrain.cluster.jobs.request import (
    JobRequest,
    build_job,
    must_be_same_recipe,
    must_have_one_subject,
)
from hpctrain.cluster.schedulers.scheduler import (
    SCHEDULERS,
    Scheduler,
    must_have_no_active_job,
)
from hpctrain.cluster.slurm.job import job_name
from hpctrain.cluster.slurm.queries import NO_ANSWER, JobId, require_command, run_command
from hpctrain.cluster.slurm.submit import END_STATES, POLL_INTERVAL_S
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.core.files import open_regular
from hpctrain.core.names import pick
from hpctrain.core.run_files import run_folder

LOG_INTERVAL_S = 1.0


class Submission(NamedTuple):
    """A job in the queue of its scheduler, and the folder of its run.

    Of a sweep the array and the sweep's folder; if each member has a job, all their ids.
    """

    job: JobId
    folder: Path


def submit(recipe: str | None = None, *, scheduler: str = "slurm", **options: Any) -> Submission:
    """Submit a job that trains `recipe`, or runs a program; return its id and the run's folder.

    `options` are the fields of `JobRequest`, as in `submit("digits", nodes=4, time="2:00:00")`, or
    `submit(program=["python", "train.py"], nodes=4)`.
    `scheduler`: "slurm", "pbs" or "flux"; the other functions find it in the run's folder.
    Raises UsageError for an unknown option, for a recipe or resources that do not fit, without
    the scheduler, and for a folder with an unfinished job or with checkpoints of another recipe.
    Raises HpctrainError if the scheduler does not answer, after which the job may be in the queue.
    """
    names = {field.name: field for field in fields(JobRequest)}
    for name in options:
        pick(names, name, "option of submit")
    must_have_one_subject(recipe, options.get("program", ()))
    options |= {} if recipe is None else {"recipe": recipe}
    request = JobRequest(**options)
    submissions = [*submit_request(request, pick(SCHEDULERS, scheduler, "scheduler"))]
    if len(submissions) == 1:
        return submissions[0]
    return Submission(" ".join(str(job) for job, _ in submissions), submissions[0].folder.parent)


def submit_request(request: JobRequest, scheduler: Scheduler) -> Iterator[Submission]:
    """Submit the jobs of a request, several for some sweeps; raises as `submit` does."""
    if members := sweeps.read_sweep(request):
        yield from itertools.starmap(Submission, sweeps.submit(request, scheduler, members))
        return
    job, site = build_job(request, check=scheduler.check)
    folder = Path(job.out or run_folder.default_path(job_name(job)))
    for run in [folder / f"nodes-{size}" for size in job.sizes] or [folder]:
        must_be_same_recipe(request, run)
    must_have_no_active_job(scheduler, folder, job.options.get("dependency", ""))
    text = scheduler.render(replace(job, out=str(folder)), site, folder)
    yield Submission(scheduler.submit(text, folder), folder)


def job_folders(paths: Iterable[str | Path]) -> list[Path]:
    """Return the folders with jobs of runs and studies; by default of all runs in runs/.

    Raises UsageError if runs/ holds none.
    """
    folders = [
        folder for path in map(Path, paths) for folder in studies.find_job_folders(path) or [path]
    ]
    folders = folders or studies.sort_by_age(Path("runs").glob("*"))
    if not folders:
        raise UsageError("runs/ holds no submitted run; name the folder of a run")
    return folders


def status(*paths: str | Path, wait_s: float = 0.0) -> list[Row]:
    """Return a row per job of runs and studies; by default of all runs in runs/.

    First wait until all jobs have ended, at most `wait_s`. A row is a dict with the `job`, its
    `state`, its `scheduler`, the `status` of its run and other keys of `hpctrain slurm status
    --json`.
    """
    return wait_for_jobs(job_folders(paths), wait_s)


def cancel(*paths: str | Path) -> list[str]:
    """Cancel all unfinished jobs of runs and studies and return the jobs' ids.

    Ranks get SIGTERM: they save a checkpoint if there is time for a step and a checkpoint until
    SIGKILL (in Slurm KillWait). Raises UsageError without a path, HpctrainError if a scheduler does
    not answer or refuses.
    """
    if not paths:
        raise UsageError("cancel: name the folder of a run or of a study")
    rows = status_rows(job_folders(paths))
    if unknown_rows := [row for row in rows if row["state"] == NO_ANSWER]:
        raise HpctrainError(f"nothing was cancelled: {unknown_rows[0]['reason']}")
    rows = [row for row in rows if row["state"] not in (*END_STATES, DAMAGED_STATE)]
    for scheduler in SCHEDULERS.values():
        if jobs := [row["job"] for row in rows if row["scheduler"] == scheduler.name]:
            command = [*scheduler.cancel, *jobs]
            require_command(command[0])
            process = run_command(command)
            if process.returncode:
                raise HpctrainError(f"{' '.join(command)}: {process.stderr.strip()}")
    return [row["job"] for row in rows]


def log(path: str | Path, job: str | None = None, follow: bool = False) -> Iterator[str]:
    """Yield the output of the newest job of a run, or of its `job`, in pieces of whole lines.

    With `follow`, wait for output until the job has ended. Raises UsageError if the run has no such
    job, or if there is no output and `follow` is False.
    """
    row = _find_row(path, job)
    scheduler = SCHEDULERS[row["scheduler"]]
    file_path = Path(row["log"] or scheduler.find_log(Path(path), row["job"]))
    if not follow and not file_path.exists():
        raise UsageError(f"job {row['job']} is {row['state']}, and {file_path} does not exist yet")
    position, query_time_s = 0, time.monotonic()
    while True:
        has_ended = not follow or row["state"] in END_STATES
        if file_path.exists():
            with open_regular(file_path) as file:
                file.seek(position)
                for line in file:
                    if line.endswith(b"\n") or has_ended:
                        position += len(line)
                        yield line.decode(errors="replace")
        if has_ended:
            return
        time.sleep(LOG_INTERVAL_S)
        if time.monotonic() - query_time_s > POLL_INTERVAL_S:
            row, query_time_s = _find_row(path, row["job"]), time.monotonic()
            file_path = Path(row["log"] or file_path)


def _find_row(path: str | Path, job: str | None) -> Row:
    """Return the row of `job`, by default of the newest job that has output."""
    rows = status_rows(job_folders([path]))
    rows_by_job = {row["job"]: row for row in rows}
    if job is not None:
        return pick(rows_by_job, job, "job")
    return next((row for row in reversed(rows) if row["log"]), rows[-1])
