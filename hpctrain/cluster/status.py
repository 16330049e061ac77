"""What became of jobs: Slurm's word, and what the files of their runs tell.

Several jobs may have written into one run, one after the other. The script of each leaves its id in
RUN/.began, so summary.json tells of that job if it is newer, and of no other.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain import files, rundir, toml
from hpctrain.cluster.controller import FORGOTTEN, NO_ANSWER, State, accounted
from hpctrain.cluster.reasons import explained, of_an_end
from hpctrain.cluster.submit import ENDED, JOBS, POLL_S, SCRIPT, hear, jobs_of
from hpctrain.errors import UsageError

Row = dict[str, Any]
DAMAGED = "damaged"
LATE_S = 10.0  #: a shared file system may show the files of a job that has ended so much later
TAIL_BYTES = 1 << 16  #: of what a job said
FAULTS = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError)  #: of damaged files
OF_ROWS = ("step", "epoch", "train_loss", "test_accuracy", "samples_per_s")
OF_RUN = ("status", "reason_of_run", "steps", "epochs", *OF_ROWS)


@dataclass(frozen=True)
class Kept:
    """What a folder keeps of its jobs."""

    folder: Path
    jobs: tuple[str, ...]  #: the latest last
    script: str = ""  #: empty for one that was given to sbatch by hand

    @property
    def sizes(self) -> list[str]:
        """The numbers of nodes of the tasks of a job array; empty for another job."""
        found = re.search(r"^sizes=\(([\d ]+)\)$", self.script, re.M)
        return found[1].split() if found else []

    def run(self, job: str) -> Path:
        """Return the folder of the run that `job`, it may be a task of an array, makes.

        It is where the script says, which of a trial of `hpctrain scale` is not `folder`.
        """
        named = re.search(r"^run=(.*)$", self.script, re.M)
        run = Path(shlex.split(named[1])[0].removesuffix("/nodes-$nodes")) if named else self.folder
        # seen from the folder of submission; not there where it was moved
        run = run if run.is_absolute() and run.is_dir() else self.folder
        task = job.partition("_")[2]
        return run / f"nodes-{self.sizes[int(task)]}" if self.sizes and task else run


def kept(folder: Path) -> Kept:
    """Return what `folder` keeps; a job that was given to sbatch by hand has left its id there.

    Raises UsageError for damaged ids, and OSError where the script is gone.
    """
    jobs, began = [str(job) for job in jobs_of(folder)], rundir.begun_by(folder)
    if began and began not in jobs:
        jobs = sorted([*jobs, began], key=_numbers)
    script = folder / SCRIPT
    by_hand = not script.exists() and not (folder / JOBS).exists()
    return Kept(folder, tuple(jobs), "" if by_hand else script.read_text())


def _numbers(job: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", job)]


def status(folders: Sequence[Path]) -> list[Row]:
    """Return a row for the latest job of each run, and for each before it that has not ended.

    Of an array a row per task, also of those that Slurm has forgotten; of a damaged folder one that
    says so. Raises UsageError where no job was submitted from a folder.
    """
    found = [_kept(folder) for folder in folders]
    whole = [one for one in found if isinstance(one, Kept)]
    if none := [one.folder for one in whole if not one.jobs]:
        raise UsageError(
            f"{none[0]} holds no {JOBS}: expected the folder of a run that `hpctrain slurm submit` "
            "or a script of slurm/ made, or of a study of `hpctrain scale --on slurm`"
        )
    said = hear([one.jobs[-1] for one in whole], [job for one in whole for job in one.jobs[:-1]])
    rows = (_rows(one, said) if isinstance(one, Kept) else [one] for one in found)
    return [row for some in rows for row in some]


def _kept(folder: Path) -> Kept | Row:
    try:
        return kept(folder)
    except FAULTS as error:
        state = State("-", DAMAGED, _fault(error))
        return {**vars(state), **_of_run(folder), "log": None, "said": None, "earlier": ""}


def _fault(error: Exception) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)


def _of_run(run: Path, **told: Any) -> Row:
    return {"run": str(run), **dict.fromkeys(OF_RUN), **told}


def _rows(one: Kept, said: Mapping[str, list[State]]) -> list[Row]:
    """Return the rows of a run; the last tells how the jobs before it ended, if Slurm knows."""
    *before, newest = one.jobs
    states = [state for job in before for state in said[job]]
    shown = [state for state in states if state.state not in ENDED]
    shown += _whole(newest, said[newest], len(one.sizes))
    earlier = ", ".join(f"{one.job} {one.state}" for one in states if one.state in ENDED)
    rows = [_row(one, state) for state in shown]
    return [*rows[:-1], rows[-1] | {"earlier": earlier}]


def _whole(job: str, states: list[State], tasks: int) -> list[State]:
    """Return `states`; of an array of so many `tasks` also those that the controller has forgotten.

    It forgets each task some minutes after that has ended, while others go on.
    """
    if not tasks or states[0].state == NO_ANSWER:
        return states
    names = [f"{job}_{task}" for task in range(tasks)]
    known = {state.job: state for state in states}
    if not known.keys() >= set(names):
        known = {state.job: state for state in accounted(job)} | known
    return [known.get(name, State(name, "UNKNOWN", FORGOTTEN)) for name in names]


def _row(one: Kept, state: State) -> Row:
    """Return what is known of a job, or of a task of an array."""
    try:
        run = one.run(state.job)
        of_run = _of_run(run, **told(run, state.job))
    except FAULTS as error:
        of_run = _of_run(one.folder, status=DAMAGED, reason_of_run=_fault(error))
    log = _log(one.folder, state)
    failed = state.state in ENDED and of_run["status"] != "done"
    spoken = {
        "log": str(log) if log else None,
        "said": last_words(log, state.job) if log and failed else None,
    }
    return {**vars(state), **of_run, **spoken, "earlier": ""}


def told(run: Path, job: str) -> Row:
    """Return what the files of a run tell of it so far; how it ended only if that was in `job`."""
    last: Row = {}
    for row in rundir.rows(run):  # not every one comes with an evaluation
        last |= {key: row[key] for key in OF_ROWS if row.get(key) is not None}
    summary = rundir.read_summary(run) or {}
    asked = _asked(run)
    ended = summary if rundir.ended_by(run, job) else {}
    return {
        "status": ended.get("status"),
        "reason_of_run": ended.get("reason"),
        "steps": asked.get("steps"),
        "epochs": asked.get("epochs"),
        **last,
    }


def _asked(run: Path) -> Row:
    """Return `[run]` of the resolved recipe; empty before training begins."""
    path = run / rundir.RECIPE
    text = files.read_text(path, toml.LIMIT_BYTES) if path.exists() else ""
    table = toml.parsed(text, str(path)).get("run")
    return table if isinstance(table, dict) else {}


def _log(folder: Path, state: State) -> Path | None:
    """Return the file with what a job said: ours, or where Slurm says; None where it is not."""
    ours = folder / f"slurm-{state.job}.out"
    theirs = Path(state.log) if state.log else ours
    return next((path for path in (ours, theirs) if path.is_file()), None)


def last_words(log: Path, job: str) -> str:
    """Return the last line in which the script of `job`, or hpctrain, speaks; else the last one."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    plain = ("".join(c for c in line if c.isprintable()).strip() for line in text.splitlines())
    lines = [line for line in plain if line]
    ours = [line for line in lines if line.startswith((f"job {job}: ", "hpctrain: "))]
    return (ours or lines or [""])[-1]


def wait(folders: Sequence[Path], limit_s: float) -> list[Row]:
    """Return the status of all jobs once they have ended, or after `limit_s`."""
    deadline, pause, ran = time.monotonic() + limit_s, 0.5, time.monotonic()
    while True:
        rows, now = status(folders), time.monotonic()
        ended = all(row["state"] in (*ENDED, DAMAGED) for row in rows)
        ran = ran if ended else now
        late = now - ran < LATE_S and any(map(_is_late, rows))
        left = deadline - now
        if left <= 0 or (ended and not late):
            return rows
        time.sleep(min(pause, left))
        pause = min(2 * pause, POLL_S)


def _is_late(row: Row) -> bool:
    """Return whether a summary is missing that a script has seen: it ends with 0 if all is done."""
    return row["state"] == "COMPLETED" and row["status"] is None


def is_done(row: Row) -> bool:
    """Return whether a run is done by its own word, and Slurm says nothing else of its job."""
    return row["status"] == "done" and row["state"] in ("COMPLETED", "UNKNOWN")


def meaning(row: Row) -> str:
    """Return why a job is where it is: the run's own reason, the log's, Slurm's."""
    if DAMAGED in (row["state"], row["status"]):
        return f"damaged: {row['reason_of_run'] or row['reason']}"
    if row["state"] in ("RUNNING", "COMPLETING") or is_done(row):
        return ""
    if row["state"] not in ENDED:
        return explained(row["reason"], row["restarts"])
    why = row["reason_of_run"] or row["said"] or of_an_end(row["reason"])
    code = "" if row["state"] == "CANCELLED" else _code(row["exit_code"])
    return "; ".join(part for part in (why, code, row["log"]) if part)


def _code(told: str) -> str:
    """Return in words how a script ended, of which Slurm says CODE:SIGNAL."""
    code, _, signal = told.partition(":")
    if signal not in ("", "0"):
        return f"signal {signal}"
    return "" if code in ("", "0") else f"exit code {code}"
