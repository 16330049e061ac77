"""Submit jobs to Slurm and query their states; status.py adds the files of their runs.

Beside the files of `hpctrain train`, a run's folder holds
job.sbatch      the script submitted last
jobs.json       the ids of its jobs, the latest last
slurm-ID.out    the output of each of them
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TypeVar

from hpctrain.cluster.slurm import sbatch
from hpctrain.cluster.slurm.queries import (
    NO_ANSWER,
    JobId,
    JobState,
    NoAnswerError,
    from_scontrol,
    from_slurm,
    must_have,
    reply_was_lost,
    run,
)
from hpctrain.cluster.slurm.refusals import refusal
from hpctrain.core import files, launchers
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.run_files import run_folder

T = TypeVar("T", int, str)
SCRIPT, JOBS = "job.sbatch", "jobs.json"
LIMIT_BYTES = 1 << 20  #: of jobs.json
POLL_S = 10.0
END_STATES = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "TIMEOUT", "UNKNOWN",
)  # fmt: skip


def submit(text: str, folder: Path, options: Sequence[str] = ()) -> int:
    """Give the script `text` to sbatch and return the job's id; keep both in `folder`.

    `options` are words for sbatch. The job runs in the current folder, and finds this Python's
    `hpctrain` first. Raises UsageError in a rank of another job, where there is no Slurm, where
    `folder` cannot be made or written, or with sbatch's own words; HpctrainError where the job may
    be, or is, in the queue, and something else went wrong.
    """
    must_have("sbatch")
    outer = launchers.launched(os.environ)
    if outer.size > 1:
        raise UsageError(f"this is rank {outer.rank} of {outer.size}: each would submit a job")
    _must_be_same_cluster()
    is_new_folder = not folder.exists()
    earlier = jobs_of(folder)
    script = _write_script(folder, text, is_new_folder)
    job = _id_in(_sbatch_reply(text, folder, script, options, is_new_folder))
    try:
        run_folder.write_json(folder / JOBS, {"jobs": [*earlier, job]})
    except OSError as error:
        raise HpctrainError(
            f"job {job} is submitted, but {folder} cannot keep its id: {error.strerror}; "
            f"`scancel {job}` ends it, `squeue --job {job}` shows it"
        ) from None
    return job


def _sbatch_reply(
    text: str, folder: Path, script: Path, options: Sequence[str], is_new_folder: bool
) -> str:
    """Return sbatch's reply on an accepted job; its script gets its final name."""
    line = ["sbatch", "--parsable", *_output(text, folder), *options]
    try:
        # For sbatch a variable overrides a line of the script, which was checked.
        process = run(line, text, ignored=sbatch.variables(_options(text)))
    except NoAnswerError as error:
        raise _no_answer(str(error), folder, text, script) from None
    if process.returncode and reply_was_lost(process.stderr):
        raise _no_answer(process.stderr, folder, text, script)
    if process.returncode:
        _remove_script(script, is_new_folder)
        raise UsageError(refusal(process.stderr, text))
    with suppress(OSError):  # where this fails, jobs.json cannot be written, which is reported
        script.replace(folder / SCRIPT)
    return process.stdout


def _must_be_same_cluster() -> None:
    """Raise UsageError where sbatch would submit to another cluster than scontrol queries."""
    chosen = os.environ.get("SBATCH_CLUSTERS")
    if chosen and chosen != os.environ.get("SLURM_CLUSTERS"):
        raise UsageError(
            f"SBATCH_CLUSTERS={chosen} is read by sbatch alone, and `status` would query another "
            f"cluster: export SLURM_CLUSTERS={chosen} as well"
        )


def _write_script(folder: Path, text: str, is_new_folder: bool) -> Path:
    """Make `folder`, and a file in it that holds the script: after sbatch it only gets its name.

    Raises UsageError where that cannot be, as on a full disk, and leaves nothing.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be made: {error.strerror}") from None
    script = folder / f".{SCRIPT}.{os.getpid()}"
    try:
        script.write_text(text)
    except OSError as error:
        _remove_script(script, is_new_folder)
        raise UsageError(f"--out {folder} cannot be written: {error.strerror}") from None
    return script


def _remove_script(script: Path, is_new_folder: bool) -> None:
    """Remove the files that `_write_script` made."""
    with suppress(OSError):
        script.unlink(missing_ok=True)
        if is_new_folder:
            script.parent.rmdir()


def _no_answer(reply: str, folder: Path, text: str, script: Path) -> HpctrainError:
    """Return the error about a job that may be in the queue, and keep its script."""
    script.replace(folder / SCRIPT)
    match = re.search(r"^#SBATCH --job-name=(.*)$", text, re.M)
    name = f" --name={match[1]}" if match else ""
    return NoAnswerError(
        f"no answer of Slurm's controller ({' '.join(reply.split())}): the job may be in the queue "
        f"all the same. See `squeue --me{name}` before you submit again; {folder} stays, and "
        "`hpctrain slurm status` shows the job there once it runs"
    )


def _id_in(output: str) -> int:
    """Return the job's id in sbatch's output; some sites add lines of their own."""
    match = re.search(r"^(\d+)(;\S*)?$", output, re.M)
    if match is None:
        raise HpctrainError(f"sbatch took the script, but did not return the job's id: {output!r}")
    return int(match[1])


def _output(text: str, folder: Path) -> list[str]:
    """Return the option that writes a job's output into `folder`, unless the script has one."""
    options = _options(text)
    if "output" in options:
        return []
    output_prefix = str(folder.absolute() / "slurm-").replace("%", "%%")
    return [f"--output={output_prefix}{'%A_%a' if 'array' in options else '%j'}.out"]


def _options(text: str) -> set[str]:
    return {match[1] for match in re.finditer(r"^#SBATCH --([a-z-]+)", text, re.M)}


def jobs_of(folder: Path) -> list[int]:
    """Return the ids of the jobs of a run, the latest last."""
    path = folder / JOBS
    try:
        document = files.read_json(path, LIMIT_BYTES) if path.exists() else {"jobs": []}
        return [int(job) for job in document["jobs"]]
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f'{path} is damaged: expected {{"jobs": [17, ...]}}; write the ids anew, or remove it'
        ) from None


def jobs_named(name: str) -> list[int]:
    """Return the jobs of this name that have not ended, the latest last."""
    process = run(
        ["squeue", "--noheader", f"--user={getpass.getuser()}", f"--name={name}", "--format=%A"]
    )
    if process.returncode:
        raise HpctrainError(f"squeue does not list jobs: {process.stderr.strip()}")
    return sorted({int(line) for line in process.stdout.split()})


def must_be_free(folder: Path, dependency: str = "") -> None:
    """Raise UsageError where a job of `folder` has not ended, unless the new one waits for it.

    `dependency` is the option of that name which the new job has.
    """
    for states in job_states([], jobs_of(folder)).values():
        for state in states:
            waits_for_job = state.job.partition("_")[0] in re.findall(r"\d+", dependency)
            if state.state in (*END_STATES, NO_ANSWER) or "singleton" in dependency:
                continue
            if not waits_for_job or "after:" in dependency:
                raise UsageError(
                    f"--out {folder}: its job {state.job} is {state.state}, and two jobs cannot "
                    f"write there at once; add --option dependency=afterany:{state.job}, name "
                    f"another --out, or `scancel {state.job}`"
                )


def job_states(jobs: Iterable[T], older_jobs: Iterable[T] = ()) -> dict[T, list[JobState]]:
    """Return the states of each job; of `older_jobs` only those that the controller still knows.

    After a controller that does not answer, the state is NO_ANSWER for all other jobs as well.
    """
    states, failure = {}, ""
    for job, query in chain(
        ((job, from_slurm) for job in jobs), ((job, from_scontrol) for job in older_jobs)
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
