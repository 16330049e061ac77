"""Jobs given to Slurm, and whether they are still there; what became of them: status.py.

A run's folder holds beside what `hpctrain train` writes
job.sbatch      what was submitted last
jobs.json       the ids of its jobs, the latest last
slurm-ID.out    what each of them said
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

from hpctrain import files, launchers, rundir
from hpctrain.cluster import sbatch
from hpctrain.cluster.controller import (
    NO_ANSWER,
    Job,
    Silence,
    State,
    answers_late,
    ask,
    controlled,
    must_have,
    run,
)
from hpctrain.cluster.refusals import refusal
from hpctrain.errors import HpctrainError, UsageError

T = TypeVar("T", int, str)
SCRIPT, JOBS = "job.sbatch", "jobs.json"
LIMIT_BYTES = 1 << 20  #: of jobs.json
POLL_S = 10.0
ENDED = (
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
    here = launchers.launched(os.environ)
    if here.size > 1:
        raise UsageError(f"this is rank {here.rank} of {here.size}: each would submit a job")
    _must_be_found_again()
    new = not folder.exists()
    known = jobs_of(folder)
    script = _written(folder, text, new)
    job = _id_in(_given(text, folder, script, options, new))
    try:
        rundir.write_json(folder / JOBS, {"jobs": [*known, job]})
    except OSError as error:
        raise HpctrainError(
            f"job {job} is submitted, but {folder} cannot keep its id: {error.strerror}; "
            f"`scancel {job}` ends it, `squeue --job {job}` shows it"
        ) from None
    return job


def _given(text: str, folder: Path, script: Path, options: Sequence[str], new: bool) -> str:
    """Return what sbatch says of a job that it takes; its script gets its name."""
    line = ["sbatch", "--parsable", *_output(text, folder), *options]
    try:
        # For sbatch a variable goes before a line of the script, which was asked for and checked.
        done = run(line, text, without=sbatch.variables(_options(text)))
    except Silence as error:
        raise _late(str(error), folder, text, script) from None
    if done.returncode and answers_late(done.stderr):
        raise _late(done.stderr, folder, text, script)
    if done.returncode:
        _drop(script, new)
        raise UsageError(refusal(done.stderr, text))
    with suppress(OSError):  # where this cannot be, jobs.json cannot be written, which is told
        script.replace(folder / SCRIPT)
    return done.stdout


def _must_be_found_again() -> None:
    """Raise UsageError where sbatch would ask another cluster than scontrol does."""
    chosen = os.environ.get("SBATCH_CLUSTERS")
    if chosen and chosen != os.environ.get("SLURM_CLUSTERS"):
        raise UsageError(
            f"SBATCH_CLUSTERS={chosen} is read by sbatch alone, and `status` would ask another "
            f"cluster: export SLURM_CLUSTERS={chosen} as well"
        )


def _written(folder: Path, text: str, new: bool) -> Path:
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
        _drop(script, new)
        raise UsageError(f"--out {folder} cannot be written: {error.strerror}") from None
    return script


def _drop(script: Path, new: bool) -> None:
    """Remove what `_written` made."""
    with suppress(OSError):
        script.unlink(missing_ok=True)
        if new:
            script.parent.rmdir()


def _late(said: str, folder: Path, text: str, script: Path) -> HpctrainError:
    """Return the error that says what may be in the queue, and keep its script."""
    script.replace(folder / SCRIPT)
    found = re.search(r"^#SBATCH --job-name=(.*)$", text, re.M)
    name = f" --name={found[1]}" if found else ""
    return Silence(
        f"no answer of Slurm's controller ({' '.join(said.split())}): the job may be in the queue "
        f"all the same. See `squeue --me{name}` before you submit again; {folder} stays, and "
        "`hpctrain slurm status` shows the job there once it runs"
    )


def _id_in(said: str) -> int:
    """Return the job's id in what sbatch says; some sites let it say more."""
    found = re.search(r"^(\d+)(;\S*)?$", said, re.M)
    if found is None:
        raise HpctrainError(f"sbatch took the script, and has not told the job's id: {said!r}")
    return int(found[1])


def _output(text: str, folder: Path) -> list[str]:
    """Return the option that sends what a job says into `folder`, unless the script has one."""
    given = _options(text)
    if "output" in given:
        return []
    out = str(folder.absolute() / "slurm-").replace("%", "%%")
    return [f"--output={out}{'%A_%a' if 'array' in given else '%j'}.out"]


def _options(text: str) -> set[str]:
    return {found[1] for found in re.finditer(r"^#SBATCH --([a-z-]+)", text, re.M)}


def jobs_of(folder: Path) -> list[int]:
    """Return the ids of the jobs of a run, the latest last."""
    path = folder / JOBS
    try:
        told = files.read_json(path, LIMIT_BYTES) if path.exists() else {"jobs": []}
        return [int(job) for job in told["jobs"]]
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f'{path} is damaged: expected {{"jobs": [17, ...]}}; write the ids anew, or remove it'
        ) from None


def named(name: str) -> list[int]:
    """Return the jobs of this name that have not ended, the latest last."""
    done = run(
        ["squeue", "--noheader", f"--user={getpass.getuser()}", f"--name={name}", "--format=%A"]
    )
    if done.returncode:
        raise HpctrainError(f"squeue does not tell of jobs: {done.stderr.strip()}")
    return sorted({int(line) for line in done.stdout.split()})


def must_be_free(folder: Path, dependency: str = "") -> None:
    """Raise UsageError where a job of `folder` has not ended, unless the new one waits for it.

    `dependency` is the option of that name which the new job has.
    """
    for states in hear([], jobs_of(folder)).values():
        for state in states:
            waits = state.job.partition("_")[0] in re.findall(r"\d+", dependency)
            if state.state in (*ENDED, NO_ANSWER) or "singleton" in dependency:
                continue
            if not waits or "after:" in dependency:
                raise UsageError(
                    f"--out {folder}: its job {state.job} is {state.state}, and two jobs cannot "
                    f"write there at once; add --option dependency=afterany:{state.job}, name "
                    f"another --out, or `scancel {state.job}`"
                )


def heard(job: int) -> list[State]:
    """Return what `ask` does; a controller that does not answer says nothing new."""
    return hear([job])[job]


def hear(jobs: Iterable[T], older: Iterable[T] = ()) -> dict[T, list[State]]:
    """Return what Slurm says of each job; of the `older` ones, what the controller remembers.

    A controller that does not answer says nothing new, and is not asked again for the others.
    """
    found, silence = {}, ""
    for job, asked in chain(((job, ask) for job in jobs), ((job, controlled) for job in older)):
        try:
            found[job] = [_silent(job, silence)] if silence else asked(job)
        except UsageError:
            raise
        except HpctrainError as error:
            found[job] = [_silent(job, str(error))]
            silence = str(error) if isinstance(error, Silence) else ""
    return found


def _silent(job: Job, why: str) -> State:
    return State(str(job), NO_ANSWER, why)
