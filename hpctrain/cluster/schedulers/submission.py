"""Submit a script of PBS or Flux and keep its id; the folder of a run holds what Slurm's does.

job.pbs, job.flux   the script of the latest job
jobs.json           the scheduler, and the ids of its jobs, the latest last
ID.OU, flux-ID.out  the output of each job
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from hpctrain.cluster.schedulers.dialect import Dialect
from hpctrain.cluster.slurm.queries import NoAnswerError, require_command, run_command
from hpctrain.cluster.slurm.submit import JOBS_FILE, read_jobs_file
from hpctrain.core import atomic, launchers
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.core.run_files import run_folder


def submit_script(dialect: Dialect, text: str, folder: Path) -> str:
    """Submit the text of a script; return the job's id, which `folder` keeps with the script.

    Raises UsageError in a rank of another job, without the scheduler, if `folder` is not writable,
    and if the scheduler refuses the script. Raises HpctrainError for another failure, after which
    the job may be in the queue.
    """
    require_command(dialect.submit[0], f"hpctrain {dialect.name} render")
    launchers.must_not_be_rank(os.environ, "each would submit a job")
    if bad := [char for char in dialect.bad_in_folder if char in str(folder.absolute())]:
        raise UsageError(
            f"--out {folder}: expected a path without {bad[0]!r}, for the job's output"
        )
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic.replace(folder / f".{dialect.script_file}", text)  # before a job is in the queue
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be written: {error.strerror}") from None
    options = dialect.output_options(folder)
    command = " ".join(dialect.submit)
    try:
        process = run_command([*dialect.submit, *options], text)
    except NoAnswerError as error:
        (folder / f".{dialect.script_file}").replace(folder / dialect.script_file)
        raise NoAnswerError(
            f"{error}: the job may still be in the queue; see there before you submit again"
        ) from None
    if process.returncode:
        with suppress(OSError):
            (folder / f".{dialect.script_file}").unlink()
            for path in new_folders:
                path.rmdir()
        raise UsageError(f"{command} refuses the job:\n{process.stderr.strip()}")
    (folder / f".{dialect.script_file}").replace(folder / dialect.script_file)
    job = dialect.parse_id(process.stdout)
    if not job:
        raise HpctrainError(
            f"{command} accepted the script, but did not return its id: {process.stdout!r}"
        )
    record_job(dialect, folder, job)
    return job


def record_job(dialect: Dialect, folder: Path, job: str) -> None:
    """Append a job to those of `folder`, unless it is among them."""
    name, jobs = read_jobs_file(folder)
    if jobs and name != dialect.name:
        raise UsageError(f"{folder} holds jobs of {name}: name another folder for the run")
    if job in jobs:
        return
    try:
        run_folder.write_json(folder / JOBS_FILE, {"scheduler": dialect.name, "jobs": [*jobs, job]})
    except OSError as error:
        raise HpctrainError(
            f"job {job} is submitted, but {folder} cannot keep its id: {error.strerror}; "
            f"`{' '.join(dialect.cancel)} {job}` ends it"
        ) from None
