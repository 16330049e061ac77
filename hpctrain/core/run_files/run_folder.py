"""The folder of a run: its lock, its rows of metrics, its summary.

DIR/recipe.toml      the resolved recipe: training it again repeats the run
DIR/metrics.jsonl    a row per interval
DIR/checkpoints/     see hpctrain/checkpoint
DIR/summary.json     the outcome; written last, so that a reader never sees it incomplete
DIR/replay/          the order of events of an asynchronous run; see hpctrain/engines/replay
DIR/trace.json       the spans of each thread, if [trace] is enabled; see hpctrain/training/timeline
DIR/NAME/            of a tracker: tensorboard, wandb, mlflow, csv; see hpctrain/training/loggers
DIR/watch/           the present state of each rank, while it runs
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

from hpctrain.core import atomic, files
from hpctrain.core.errors import UsageError
from hpctrain.core.files import FileError, MissingError, brief
from hpctrain.core.run_files import schemas
from hpctrain.core.run_files.folder_lock import LOCK, lock_folder
from hpctrain.core.strict_json import to_json

log = logging.getLogger(__name__)

SUMMARY, METRICS, RECIPE = "summary.json", "metrics.jsonl", "recipe.toml"
#: The number of steps done again by all parts of a run: a part that is killed cannot report it.
REDONE = ".redone"
#: A launcher writes the reason to stop there, before it sends the signal.
STOP_REASON = ".why"
#: A job of Slurm writes its id there, before it starts the ranks.
SLURM_JOB = ".began"
NOTE_BYTES, RECIPE_BYTES, SUMMARY_BYTES = 4096, files.MIB, 16 * files.MIB
ROW_BYTES = 16 * files.MIB
#: The variable in which `hpctrain launch` names a file; rank 0 writes the run's folder there. It
#: lies in launch's memory, under this name: it vanishes when launch ends, also when killed.
ANNOUNCE, ANNOUNCE_FILE = "HPCTRAIN_ANNOUNCE", "hpctrain-announce"


def default_path(recipe_name: str) -> Path:
    """Return `runs/RECIPE-TIME`, with a number appended if that exists."""
    path = Path("runs") / f"{recipe_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (path.with_name(f"{path.name}-{i}") for i in count(2))
    return next(p for p in chain([path], numbered) if not p.exists())


@contextmanager
def claim(run: Path, resume: bool, wait_s: float = 0.0) -> Iterator[None]:
    """Make the folder and lock it for this job; the kernel releases the lock at any exit.

    `wait_s`: for a lock that another process may be about to release.
    Raises UsageError if another job holds it, if a run lies there and `resume` is not set, or if
    it cannot be written.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        if not resume and (names := _list_contents(run)):
            raise UsageError(
                f"{run} is in use: it holds {names}. Add --resume (in Python resume=True) to go on "
                "with that run, or name a new folder"
            )
        lock = lock_folder(run, wait_s)
    except OSError as error:
        raise UsageError(f"{error.filename or run} cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def writable(run: Path) -> Iterator[None]:
    """Turn OSErrors into UsageError: before training begins there is nothing to save."""
    try:
        yield
    except OSError as error:
        path = error.filename or run
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None


def _list_contents(run: Path) -> str:
    names = sorted(
        path.name for path in run.iterdir() if path.name != LOCK and not atomic.is_left(path)
    )
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def begin(run: Path) -> None:
    """Remove the summary of an earlier part; announce `run` to `hpctrain launch`, if any."""
    (run / SUMMARY).unlink(missing_ok=True)
    (run / STOP_REASON).unlink(missing_ok=True)
    file = os.environ.get(ANNOUNCE, "")
    with suppress(OSError):
        if os.readlink(file).startswith(
            f"/memfd:{ANNOUNCE_FILE}"
        ):  # not a file of some other process
            Path(file).write_bytes(os.fsencode(run.absolute()))


def stop_reason(run: Path) -> str:
    """Return the reason to stop that a job script has written; empty if none."""
    return _read_note(run / STOP_REASON)


def slurm_job(run: Path) -> str:
    """Return the Slurm job that last started the run; empty if none is recorded."""
    return _read_note(run / SLURM_JOB)


def _read_note(path: Path) -> str:
    """Return the text of a one-line file; empty if it is missing or cannot be read."""
    try:
        return files.read_text(path, NOTE_BYTES).strip()
    except FileError:
        return ""


def is_summary_of(run: Path, job: str) -> bool:
    """Return whether `job` wrote summary.json: it started last, and the summary is newer."""
    summary, start = run / SUMMARY, run / SLURM_JOB
    if slurm_job(run) != job or not summary.exists():
        return False
    return summary.stat().st_mtime_ns >= start.stat().st_mtime_ns


def write_recipe(run: Path, text: str) -> None:
    """Write the resolved recipe; warn of lines that a resumed run changes."""
    path = run / RECIPE
    try:
        previous_lines = set(files.read_text(path, RECIPE_BYTES).splitlines())
    except MissingError:
        previous_lines = set(text.splitlines())
    for changed_line in sorted(set(text.splitlines()) - previous_lines):
        log.warning("the recipe of this run changes: %s", changed_line)
    atomic.replace(path, text)


def recipe_file(run: Path, instead: str) -> Path:
    """Return the recipe's file of a run; the error for one without names a call `instead`."""
    file = run / RECIPE
    if run.is_dir() and not file.is_file():
        raise UsageError(
            f"{run} has no {RECIPE}; expected the folder of `hpctrain train`. For a run of your "
            f"own Trainer: {instead}"
        )
    files.open_regular(file).close()  # later it is read as a file that a user names
    return file


def append_row(run: Path, *rows: Mapping[str, Any]) -> None:
    """Append rows to metrics.jsonl, all or none; raise OSError if that fails."""
    files.append_lines(run / METRICS, "".join(to_json(row) + "\n" for row in rows))


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl, without a last line that a crash cut off."""
    return _read_rows(run).entries


def _read_rows(run: Path) -> files.Log[dict[str, Any]]:
    try:
        return files.read_log(run / METRICS, schemas.row, ROW_BYTES)
    except MissingError:
        return files.Log([])


def cut_rows(run: Path, step: int) -> int:
    """Drop the rows after `step`; return the number of steps in them, which will be done again."""
    old_rows = _read_rows(run)
    if old_rows.torn_bytes:
        log.warning("%s ended in half a line, which is dropped", run / METRICS)
    remaining_rows = [row for row in old_rows.entries if row["step"] <= step]
    if len(remaining_rows) < len(old_rows.entries) or old_rows.torn_bytes:
        atomic.replace(run / METRICS, "".join(to_json(row) + "\n" for row in remaining_rows))
    return max([step, *(row["step"] for row in old_rows.entries)]) - step


def go_back(run: Path, step: int, recorded: int) -> int:
    """Drop the rows after `step`; return the number of steps that all parts of the run do again.

    `recorded`: that number according to the checkpoint.
    """
    redone_before = _read_redone(run / REDONE)
    redone = max(redone_before, recorded) + max(cut_rows(run, step), 0)
    if redone > redone_before:
        atomic.replace(run / REDONE, f"{redone}\n")
    return redone


def _read_redone(path: Path) -> int:
    try:
        text = files.read_text(path, NOTE_BYTES).strip()
    except MissingError:
        return 0
    if not re.fullmatch("[0-9]{1,18}", text):
        raise FileError(f"{path}: expected a number of steps, seen {brief(text)}; remove it")
    return int(text)


def add_missing(run: Path, due_rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Append the rows in `due_rows` later than the last of metrics.jsonl; return all rows."""
    present_rows = rows(run)
    last_step = present_rows[-1]["step"] if present_rows else 0
    if late_rows := [row for row in due_rows if schemas.row(row)["step"] > last_step]:
        append_row(run, *late_rows)
    return [*present_rows, *late_rows]


def write_summary(run: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json whole or not at all."""
    write_json(run / SUMMARY, summary)


def write_json(path: Path, table: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    atomic.replace(path, _as_text(table))


def write_first_summary(run: Path, summary: Mapping[str, Any]) -> bool:
    """Write summary.json unless there is one; return whether this rank was the first."""
    temporary_path = atomic.write_aside(run / SUMMARY, _as_text(summary))
    try:
        os.link(temporary_path, run / SUMMARY)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        write_summary(run, summary)
    finally:
        os.unlink(temporary_path)
    return True


def read_summary(run: Path) -> dict[str, Any] | None:
    """Return the contents of summary.json, None if there is none."""
    path = Path(run) / SUMMARY
    try:
        return schemas.summary(files.read_json_object(path, SUMMARY_BYTES))
    except MissingError:
        return None
    except FileError:
        raise
    except ValueError as error:
        raise FileError(f"{path}: {error}") from None


def _as_text(summary: Mapping[str, Any]) -> str:
    return to_json(summary, indent=2) + "\n"
