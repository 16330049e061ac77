"""The folder of a run: who may write in it, its rows of metrics, its summary.

DIR/recipe.toml      what was run, resolved: training it again repeats the run
DIR/metrics.jsonl    a row per interval
DIR/checkpoints/     see hpctrain/checkpoint
DIR/summary.json     how it ended; written last, so a reader never sees half of the truth
DIR/replay/          what happened in which order, where that matters; see hpctrain/engines/replay
DIR/trace.json       what each thread did, where that was asked for; see hpctrain/timeline
DIR/watch/           what each rank is doing, while it runs
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

from hpctrain import atomic, files, schemas
from hpctrain.errors import UsageError
from hpctrain.files import FileError, MissingError, brief

log = logging.getLogger(__name__)

SUMMARY, METRICS, RECIPE = "summary.json", "metrics.jsonl", "recipe.toml"
LOCK = ".lock"
#: How many steps were done again, by all parts of a run: a part that is lost at once tells nobody.
REDONE = ".redone"
#: Where a job script writes, before it sends the signal, why a run is to stop.
WHY = ".why"
#: Where a job script writes, before it starts the ranks, which job of Slurm it is.
BEGAN = ".began"
NOTE_BYTES, RECIPE_BYTES, SUMMARY_BYTES = 4096, files.MIB, 16 * files.MIB
#: The variable in which `hpctrain launch` names a file; rank 0 writes the run's folder there. It
#: lies in launch's memory, under this name: so it ends with launch, in whatever way.
ANNOUNCE, NOTE = "HPCTRAIN_ANNOUNCE", "hpctrain-announce"


def default_path(recipe_name: str) -> Path:
    """Return `runs/RECIPE-TIME`, with a number behind it where that is taken."""
    path = Path("runs") / f"{recipe_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (path.with_name(f"{path.name}-{i}") for i in count(2))
    return next(p for p in chain([path], numbered) if not p.exists())


@contextmanager
def claimed(run: Path, resume: bool) -> Iterator[None]:
    """Make the folder and hold it for this job alone; the kernel gives it back however we end.

    Raises UsageError if another job holds it, if a run lies there and `resume` is not set, or if
    it cannot be written.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        if not resume and (names := _names(run)):
            raise UsageError(
                f"--out {run} is in use: it holds {names}. Add --resume to go on with that run, or "
                "name a new folder"
            )
        lock = locked(run)
    except OSError as error:
        raise UsageError(f"--out {run} cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        os.close(lock)


class HeldError(UsageError):
    """Another process writes to a folder."""


def locked(run: Path) -> int:
    """Hold a folder until what is returned is closed; raise HeldError where another holds it."""
    lock = _opened(run / LOCK)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 200).decode(errors="replace")
        os.close(lock)
        raise HeldError(f"--out {run} is being written by {brief(holder)[1:-1]}") from None
    except OSError as error:  # some parallel file systems have no locks
        log.warning("%s cannot be locked (%s): let no other job write there", run, error.strerror)
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {os.uname().nodename}".encode())
    for folder in (run, run / "replay"):
        atomic.sweep(folder)
    return lock


def _opened(path: Path) -> int:
    """Open a lock's file, which is written: no link to another one, symbolic or hard."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(handle)
        raise UsageError(f"{path}: expected a file of its own, seen a link or no file; remove it")
    return handle


@contextmanager
def writable(run: Path) -> Iterator[None]:
    """Turn OSErrors into UsageError: before training begins there is nothing to be saved."""
    try:
        yield
    except OSError as error:
        where = error.filename or run
        raise UsageError(f"{where} cannot be written: {error.strerror or error}") from None


def _names(run: Path) -> str:
    names = sorted(
        path.name for path in run.iterdir() if path.name != LOCK and not atomic.is_left(path)
    )
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def begin(run: Path) -> None:
    """Drop what was said of an earlier part; tell `hpctrain launch`, if it started us, of `run`."""
    (run / SUMMARY).unlink(missing_ok=True)
    (run / WHY).unlink(missing_ok=True)
    _announce(run)


def _announce(run: Path) -> None:
    """Tell `hpctrain launch` where the run lies, if it started us and still runs on this host."""
    file = os.environ.get(ANNOUNCE, "")
    with suppress(OSError):
        if os.readlink(file).startswith(f"/memfd:{NOTE}"):  # not a file of some other process
            Path(file).write_bytes(os.fsencode(run.absolute()))


def why(run: Path) -> str:
    """Return why a job script says that the run is to stop; empty if it says nothing."""
    return _note(run / WHY)


def begun_by(run: Path) -> str:
    """Return the job of Slurm that was the last to begin with the run; empty if none says so."""
    return _note(run / BEGAN)


def _note(path: Path) -> str:
    """Return the text of a file of one line; empty where there is none that can be read."""
    try:
        return files.read_text(path, NOTE_BYTES).strip()
    except FileError:
        return ""


def ended_by(run: Path, job: str) -> bool:
    """Return whether summary.json tells of `job`: it was the last to begin, and wrote it then."""
    summary, began = run / SUMMARY, run / BEGAN
    if begun_by(run) != job or not summary.exists():
        return False
    return summary.stat().st_mtime_ns >= began.stat().st_mtime_ns


def write_recipe(run: Path, text: str) -> None:
    """Keep the resolved recipe; say which lines a resumed run changes."""
    path = run / RECIPE
    try:
        before = set(files.read_text(path, RECIPE_BYTES).splitlines())
    except MissingError:
        before = set(text.splitlines())
    for changed in sorted(set(text.splitlines()) - before):
        log.warning("the recipe of this run changes: %s", changed)
    atomic.replace(path, text)


def append_row(run: Path, *rows: Mapping[str, Any]) -> None:
    """Add a row or several to metrics.jsonl, all or none; raise OSError where there is no room."""
    files.append_lines(run / METRICS, "".join(json.dumps(row) + "\n" for row in rows))


def appended(run: Path, some: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add rows to metrics.jsonl; return those for which there is no room yet, after a warning."""
    try:
        append_row(run, *some)
    except OSError as error:  # as where a checkpoint cannot be saved, training goes on
        log.warning("%s of %s is not written (%s); training goes on", METRICS, run, error.strerror)
        return some
    return []


def sync_rows(run: Path) -> None:
    """Write the rows through to the disk; where that fails, training goes on."""
    with suppress(FileNotFoundError):
        try:
            files.sync(run / METRICS)
        except OSError as error:
            log.warning("%s may lose rows: %s", run / METRICS, error.strerror)


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl; a last line that was cut off by a crash is left out."""
    return _log(run).entries


def _log(run: Path) -> files.Log[dict[str, Any]]:
    try:
        return files.read_log(run / METRICS, schemas.row)
    except MissingError:
        return files.Log([])


def cut_rows(run: Path, step: int) -> int:
    """Drop the rows after `step`, which will be done again; return how many steps they told of."""
    old = _log(run)
    if old.torn_bytes:
        log.warning("%s ended in half a line, which is dropped", run / METRICS)
    kept = [row for row in old.entries if row["step"] <= step]
    if len(kept) < len(old.entries) or old.torn_bytes:
        atomic.replace(run / METRICS, "".join(json.dumps(row) + "\n" for row in kept))
    return max([step, *(row["step"] for row in old.entries)]) - step


def go_back(run: Path, step: int, known: int) -> int:
    """Drop the rows after `step`; return how many steps all parts of the run have to do again.

    `known`: so many of them a checkpoint tells of.
    """
    before = _redone(run / REDONE)
    redone = max(before, known) + max(cut_rows(run, step), 0)
    if redone > before:
        atomic.replace(run / REDONE, f"{redone}\n")
    return redone


def _redone(path: Path) -> int:
    try:
        text = files.read_text(path, NOTE_BYTES).strip()
    except MissingError:
        return 0
    if not re.fullmatch("[0-9]{1,18}", text):
        raise FileError(f"{path}: expected a number of steps, seen {brief(text)}; remove it")
    return int(text)


def add_missing(run: Path, due: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add those rows that come after all that metrics.jsonl has; return all rows."""
    there = rows(run)
    last = there[-1]["step"] if there else 0
    if late := [row for row in due if schemas.row(row)["step"] > last]:
        append_row(run, *late)
    return [*there, *late]


def write_summary(run: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json whole or not at all."""
    write_json(run / SUMMARY, summary)


def write_json(path: Path, table: Mapping[str, Any]) -> None:
    """Write a file of JSON whole or not at all."""
    atomic.replace(path, _as_text(table))


def write_first_summary(run: Path, summary: Mapping[str, Any]) -> bool:
    """Write summary.json unless there is one; return whether this rank was the first."""
    aside = atomic.write_aside(run / SUMMARY, _as_text(summary))
    try:
        os.link(aside, run / SUMMARY)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        write_summary(run, summary)
    finally:
        os.unlink(aside)
    return True


def read_summary(run: Path) -> dict[str, Any] | None:
    """Return what summary.json says, None where there is none."""
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
    return json.dumps(summary, indent=2) + "\n"
