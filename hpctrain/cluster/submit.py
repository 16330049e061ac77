"""Jobs given to Slurm, and what became of them: of Slurm's word, and of the run's own files.

A run's folder holds beside what `hpctrain train` writes
job.sbatch      what was submitted last
jobs.json       the ids of its jobs, the latest last
slurm-ID.out    what each of them said
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain import launchers, rundir
from hpctrain.cluster import sbatch
from hpctrain.cluster.controller import FORGOTTEN, State, accounted, ask, must_have, run
from hpctrain.cluster.reasons import explained
from hpctrain.cluster.refusals import refusal
from hpctrain.errors import HpctrainError, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCRIPT, JOBS = "job.sbatch", "jobs.json"
POLL_S = 10.0
ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "TIMEOUT", "UNKNOWN",
)  # fmt: skip


def submit(text: str, folder: Path, options: Sequence[str] = ()) -> int:
    """Give the script `text` to sbatch and return the job's id; keep both in `folder`.

    `options` are words for sbatch. The job runs in the current folder, and finds this Python's
    `hpctrain` first. Raises UsageError in a rank of another job, where there is no Slurm, where
    `folder` cannot be made or written, or with sbatch's own words.
    """
    must_have("sbatch")
    here = launchers.launched(os.environ)
    if here.size > 1:
        raise UsageError(f"this is rank {here.rank} of {here.size}: each would submit a job")
    _must_be_found_again()
    made = _made(folder)
    known = jobs_of(folder)
    line = ["sbatch", "--parsable", *_output(text, folder), *options]
    # For sbatch a variable goes before a line of the script, which was asked for and checked.
    done = run(line, text, without=sbatch.variables(_options(text)))
    if done.returncode:
        if made:
            folder.rmdir()
        raise UsageError(refusal(done.stderr, text))
    job = _id_in(done.stdout)
    try:
        (folder / SCRIPT).write_text(text)
        rundir.write_json(folder / JOBS, {"jobs": [*known, job]})
    except OSError as error:
        raise HpctrainError(
            f"job {job} is submitted, and {folder} cannot keep its id: {error.strerror}; scancel "
            f"{job}, or look for it with squeue"
        ) from None
    return job


def _must_be_found_again() -> None:
    """Raise UsageError where sbatch would ask another cluster than scontrol does."""
    chosen = os.environ.get("SBATCH_CLUSTERS")
    if chosen and chosen != os.environ.get("SLURM_CLUSTERS"):
        raise UsageError(
            f"SBATCH_CLUSTERS={chosen} is read by sbatch alone, and `status` would ask another "
            f"cluster: export SLURM_CLUSTERS={chosen} as well"
        )


def _made(folder: Path) -> bool:
    """Make `folder`, and see that it can be written; return whether it is new."""
    try:
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be made: {error.strerror}") from None
    try:
        with tempfile.TemporaryFile(dir=folder):
            return new
    except OSError as error:
        if new:
            folder.rmdir()
        raise UsageError(f"--out {folder} cannot be written: {error.strerror}") from None


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
        return [int(job) for job in json.loads(path.read_text())["jobs"]] if path.exists() else []
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


def heard(job: int) -> list[State]:
    """Return what `ask` does; a controller that does not answer says nothing new."""
    try:
        return ask(job)
    except UsageError:
        raise
    except HpctrainError as error:
        return [State(str(job), "NO ANSWER", str(error))]


def status(folder: Path) -> list[dict[str, Any]]:
    """Return a row for the latest job of a run, and for each before it that has not ended.

    Of an array a row per task, also of those that Slurm has forgotten. Raises UsageError where no
    job was submitted from `folder`.
    """
    jobs = jobs_of(folder)
    if not jobs:
        raise UsageError(
            f"{folder} holds no {JOBS}: expected the folder of a run that `hpctrain slurm submit` "
            "made, or of a study of `hpctrain scale --on slurm`"
        )
    before = [state for job in jobs[:-1] for state in heard(job) if state.state not in ENDED]
    last = _whole(jobs[-1], heard(jobs[-1]), len(_sizes((folder / SCRIPT).read_text())))
    return [{**vars(state), **told(_run_of(folder, state))} for state in [*before, *last]]


def _whole(job: int, states: list[State], tasks: int) -> list[State]:
    """Return `states`; of an array of so many `tasks` also those that the controller has forgotten.

    It forgets each task some minutes after that has ended, while others go on.
    """
    if not tasks or states[0].state == "NO ANSWER":
        return states
    names = [f"{job}_{task}" for task in range(tasks)]
    known = {state.job: state for state in states}
    if not known.keys() >= set(names):
        known = {state.job: state for state in accounted(job)} | known
    return [known.get(name, State(name, "UNKNOWN", FORGOTTEN)) for name in names]


def _sizes(text: str) -> list[str]:
    """Return the numbers of nodes of the tasks of a job array, nothing of another script."""
    found = re.search(r"^sizes=\(([\d ]+)\)$", text, re.M)
    return found[1].split() if found else []


def _run_of(folder: Path, state: State) -> Path:
    """Return the folder of the run that a job, or a task of an array, makes.

    It is where the script says, which of a trial of `hpctrain scale` is not `folder`.
    """
    text = (folder / SCRIPT).read_text()
    named = re.search(r"^run=(.*)$", text, re.M)
    run = Path(shlex.split(named[1])[0].removesuffix("/nodes-$nodes")) if named else folder
    # seen from the folder of submission; not there where it was moved
    folder = run if run.is_absolute() and run.is_dir() else folder
    sizes, task = _sizes(text), state.job.partition("_")[2]
    return folder / f"nodes-{sizes[int(task)]}" if sizes and task else folder


def told(run: Path) -> dict[str, Any]:
    """Return what the files of a run tell of it so far."""
    summary, rows = rundir.read_summary(run) or {}, rundir.rows(run)
    asked = _asked(run)
    keys = ("step", "epoch", "train_loss", "test_accuracy", "samples_per_s")
    # not every row comes with an evaluation
    last = {key: row[key] for row in rows for key in keys if row.get(key) is not None}
    return {
        "run": str(run),
        "status": summary.get("status"),
        "reason_of_run": summary.get("reason"),
        "steps": asked.get("steps"),
        "epochs": asked.get("epochs"),
        **{key: last.get(key) for key in keys},
    }


def _asked(run: Path) -> dict[str, Any]:
    """Return `[run]` of the resolved recipe; empty before training begins."""
    path = run / rundir.RECIPE
    table: dict[str, Any] = tomllib.loads(path.read_text()).get("run", {}) if path.exists() else {}
    return table


def wait(folders: Sequence[Path], limit_s: float) -> list[dict[str, Any]]:
    """Return the status of all jobs once they have ended, or after `limit_s`."""
    deadline, pause = time.monotonic() + limit_s, 0.5
    while True:
        rows = [row for folder in folders for row in status(folder)]
        left = deadline - time.monotonic()
        if left <= 0 or all(row["state"] in ENDED for row in rows):
            return rows
        time.sleep(min(pause, left))
        pause = min(2 * pause, POLL_S)


def meaning(row: dict[str, Any]) -> str:
    """Return why a job is where it is: the run's own reason, or Slurm's with what it means."""
    if row["state"] in ENDED and row["reason_of_run"]:
        return str(row["reason_of_run"])
    if row["state"] == "CANCELLED" and row["reason"] != "DependencyNeverSatisfied":
        return ""  # Slurm still names what the job waited for
    return explained(row["reason"])
