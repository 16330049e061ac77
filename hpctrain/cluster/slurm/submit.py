"""Submit jobs to Slurm and query their states; status.py also reads the files of their runs.

Besides the files of `hpctrain train`, a run's folder holds
job.sbatch      the script of the latest job
batch_job.py    runs the job where hpctrain is installed only in a container
jobs.json       the ids of its jobs, the latest last
slurm-ID.out    the output of each job
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TypeVar

from hpctrain.cluster.slurm import sbatch
from hpctrain.cluster.slurm.queries import (
    LOST_REPLY_PATTERN,
    NO_ANSWER,
    JobId,
    JobState,
    NoAnswerError,
    query_scontrol,
    query_slurm,
    require_command,
    run_command,
)
from hpctrain.cluster.slurm.refusals import explain_refusal
from hpctrain.cluster.slurm.render import SENT_FILE
from hpctrain.core import atomic, files, launchers, opening
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.core.run_files import run_folder

T = TypeVar("T", int, str)
Query = Callable[[JobId], list[JobState]]
SCRIPT_FILE, JOBS_FILE = "job.sbatch", "jobs.json"
MAX_JOBS_FILE_BYTES = 1 << 20
POLL_INTERVAL_S = 10.0
END_STATES = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "TIMEOUT", "UNKNOWN",
)  # fmt: skip


def submit_script(script_text: str, folder: Path, options: Sequence[str] = ()) -> int:
    """Submit a script to sbatch and return the job's id; keep both in `folder`.

    `options` are command-line options of sbatch. The job runs in the current folder, and this
    Python's `hpctrain` comes first on its PATH. Raises UsageError in a rank of another job, without
    Slurm, if `folder` is not writable, and if sbatch refuses the script. Raises HpctrainError for
    another failure, after which the job may be in the queue.
    """
    require_command("sbatch", "hpctrain slurm render")
    launchers.must_not_be_rank(os.environ, "each would submit a job")
    sbatch_cluster = os.environ.get("SBATCH_CLUSTERS")
    if sbatch_cluster and sbatch_cluster != os.environ.get("SLURM_CLUSTERS"):
        raise UsageError(
            f"only sbatch reads SBATCH_CLUSTERS={sbatch_cluster}, and `status` would query another "
            f"cluster: also export SLURM_CLUSTERS={sbatch_cluster}"
        )
    new_paths = [path for path in (folder / SENT_FILE.name, folder) if not path.exists()]
    earlier_jobs = read_job_ids(folder)
    script_path = _write_script(folder, script_text, new_paths)
    job = _parse_job_id(_call_sbatch(script_text, folder, script_path, options, new_paths))
    try:
        run_folder.write_json(folder / JOBS_FILE, {"jobs": [*earlier_jobs, job]})
    except OSError as error:
        raise HpctrainError(
            f"job {job} is submitted, but {folder} cannot keep its id: {error.strerror}; "
            f"`scancel {job}` ends it, `squeue --job {job}` shows it"
        ) from None
    return job


def _call_sbatch(
    script_text: str,
    folder: Path,
    script_path: Path,
    options: Sequence[str],
    new_paths: Sequence[Path],
) -> str:
    """Call sbatch and return its reply; the script of an accepted job gets its final name."""
    command = ["sbatch", "--parsable", *_output_option(script_text, folder), *options]
    try:
        # For sbatch, variables override lines of the script, and only the lines were checked.
        process = run_command(
            command,
            script_text,
            removed_variables=sbatch.overriding_variables(_script_options(script_text)),
        )
    except NoAnswerError as error:
        raise _no_answer_error(str(error), folder, script_text, script_path) from None
    if process.returncode and LOST_REPLY_PATTERN.search(process.stderr):
        raise _no_answer_error(process.stderr, folder, script_text, script_path)
    if process.returncode:
        _remove_script(script_path, new_paths)
        raise UsageError(explain_refusal(process.stderr, script_text))
    with suppress(OSError):  # jobs.json then cannot be written either, which is reported
        script_path.replace(folder / SCRIPT_FILE)
    return process.stdout


def _write_script(folder: Path, script_text: str, new_paths: Sequence[Path]) -> Path:
    """Make `folder` and write the script to a temporary file in it, renamed after submission.

    Beside it lies the file that runs the job. Raises UsageError and removes the `new_paths` if that
    fails, as on a full disk.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be made: {error.strerror}") from None
    script_path = folder / f".{SCRIPT_FILE}.{os.getpid()}"
    try:
        with opening.create(script_path) as file:
            file.write(script_text.encode())
        atomic.replace(folder / SENT_FILE.name, SENT_FILE.read_bytes())
    except OSError as error:
        _remove_script(script_path, new_paths)
        raise UsageError(f"--out {folder} cannot be written: {error.strerror}") from None
    return script_path


def _remove_script(script_path: Path, new_paths: Sequence[Path]) -> None:
    """Remove the files that `_write_script` made."""
    with suppress(OSError):
        script_path.unlink(missing_ok=True)
        for path in new_paths:
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)


def _no_answer_error(
    reply: str, folder: Path, script_text: str, script_path: Path
) -> HpctrainError:
    """Return the error for a job that may be in the queue; its script gets its final name."""
    script_path.replace(folder / SCRIPT_FILE)
    match = re.search(r"^#SBATCH --job-name=(.*)$", script_text, re.M)
    name = f" --name={match[1]}" if match else ""
    return NoAnswerError(
        f"no answer from Slurm's controller ({' '.join(reply.split())}): the job may still be in "
        f"the queue. See `squeue --me{name}` before you submit again; {folder} is kept, and "
        "`hpctrain slurm status` shows the job as soon as it runs"
    )


def _parse_job_id(output: str) -> int:
    """Return the job's id in sbatch's output, to which some sites add lines."""
    match = re.search(r"^(\d+)(;\S*)?$", output, re.M)
    if match is None:
        raise HpctrainError(
            f"sbatch accepted the script, but did not return the job's id: {output!r}"
        )
    return int(match[1])


def _output_option(script_text: str, folder: Path) -> list[str]:
    """Return sbatch's option for a job output in `folder`; [] if the script sets the option."""
    options = _script_options(script_text)
    if "output" in options:
        return []
    output_prefix = str(folder.absolute() / "slurm-").replace("%", "%%")
    return [f"--output={output_prefix}{'%A_%a' if 'array' in options else '%j'}.out"]


def _script_options(script_text: str) -> set[str]:
    return {match[1] for match in re.finditer(r"^#SBATCH --([a-z-]+)", script_text, re.M)}


def read_job_ids(folder: Path) -> list[int]:
    """Return the ids of the jobs of a run on Slurm, the latest last."""
    return [int(job) for job in read_jobs_file(folder)[1]]


def read_jobs_file(folder: Path) -> tuple[str, list[str]]:
    """Return the name of a run's scheduler, "slurm" if none is recorded, and its jobs' ids."""
    path = folder / JOBS_FILE
    try:
        document = files.read_json(path, MAX_JOBS_FILE_BYTES) if path.exists() else {"jobs": []}
        if (name := document.get("scheduler", "slurm")) == "slurm":
            return name, [str(int(job)) for job in document["jobs"]]
        return str(name), [str(job) for job in document["jobs"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f'{path} is damaged: expected {{"jobs": [17, ...]}}; correct the file, or remove it'
        ) from None


def find_jobs_by_name(name: str) -> list[int]:
    """Return the ids of unfinished jobs with this name, the latest last."""
    process = run_command(
        ["squeue", "--noheader", f"--user={getpass.getuser()}", f"--name={name}", "--format=%A"]
    )
    if process.returncode:
        raise HpctrainError(f"squeue does not list jobs: {process.stderr.strip()}")
    return sorted({int(line) for line in process.stdout.split()})


def must_have_no_active_job(
    folder: Path,
    dependency: str,
    query_jobs: Callable[[Iterable[str], Iterable[str]], Mapping[str, list[JobState]]],
    cancel: Sequence[str],
) -> None:
    """Raise UsageError if a job of `folder` has not ended, unless the new job waits for its end.

    `dependency` is the new job's option --dependency; `cancel` the command that ends a job. A task
    of an array is awaited by its own id, and by the array's.
    """
    for states in query_jobs([], read_jobs_file(folder)[1]).values():
        for state in states:
            job = re.sub(r"^(\d+)_.*", r"\1", state.job)  # of an array; names of servers have _ too
            ids = "|".join(map(re.escape, (job, state.job)))
            is_awaited = re.search(rf"(?<![\w.])({ids})(?![\w.])", dependency)
            if state.state in (*END_STATES, NO_ANSWER) or "singleton" in dependency:
                continue
            if not is_awaited or "after:" in dependency:
                raise UsageError(
                    f"--out {folder}: its job {state.job} is {state.state}, and two jobs cannot "
                    f"share a folder; add --option dependency=afterany:{job}, name "
                    f"another --out, or `{' '.join(cancel)} {job}`"
                )


def query_jobs(
    jobs: Iterable[T],
    older_jobs: Iterable[T] = (),
    queries: tuple[Query, Query] | None = None,
) -> dict[T, list[JobState]]:
    """Return the states of each job; accounting is not queried for `older_jobs`.

    Once the controller does not answer, all further jobs get the state NO_ANSWER. `queries`: the
    functions that query a job of the first and of the second list, by default Slurm's.
    """
    states, failure = {}, ""
    query_of_job, query_of_older_job = queries or (query_slurm, query_scontrol)
    for job, query in chain(
        ((job, query_of_job) for job in jobs), ((job, query_of_older_job) for job in older_jobs)
    ):
        try:
            states[job] = [_no_answer_state(job, failure)] if failure else query(job)
        except UsageError:
            raise
        except HpctrainError as error:
            states[job] = [_no_answer_state(job, str(error))]
            failure = str(error) if isinstance(error, NoAnswerError) else ""
    return states


def _no_answer_state(job: JobId, reason: str) -> JobState:
    return JobState(str(job), NO_ANSWER, reason)
