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

import errno
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError

log = logging.getLogger(__name__)

SUMMARY, METRICS, RECIPE = "summary.json", "metrics.jsonl", "recipe.toml"
LOCK = ".lock"
#: How many steps were done again, by all parts of a run: a part that is lost at once tells nobody.
REDONE = ".redone"
#: Where a job script writes, before it sends the signal, why a run is to stop.
WHY = ".why"
#: Where a job script writes, before it starts the ranks, which job of Slurm it is.
BEGAN = ".began"
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
    lock = os.open(run / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 200).decode()
        os.close(lock)
        raise HeldError(f"--out {run} is being written by {holder}") from None
    except OSError as error:  # some parallel file systems have no locks
        log.warning("%s cannot be locked (%s): let no other job write there", run, error.strerror)
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {os.uname().nodename}".encode())
    return lock


def _names(run: Path) -> str:
    names = sorted(path.name for path in run.iterdir() if path.name != LOCK)
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
    path = run / WHY
    return path.read_text().strip() if path.exists() else ""


def begun_by(run: Path) -> str:
    """Return the job of Slurm that was the last to begin with the run; empty if none says so."""
    path = run / BEGAN
    return path.read_text().strip() if path.exists() else ""


def ended_by(run: Path, job: str) -> bool:
    """Return whether summary.json tells of `job`: it was the last to begin, and wrote it then."""
    summary, began = run / SUMMARY, run / BEGAN
    if begun_by(run) != job or not summary.exists():
        return False
    return summary.stat().st_mtime_ns >= began.stat().st_mtime_ns


def write_recipe(run: Path, text: str) -> None:
    """Keep the resolved recipe; say which lines a resumed run changes."""
    path = run / RECIPE
    before = set(path.read_text().splitlines()) if path.exists() else set(text.splitlines())
    for changed in sorted(set(text.splitlines()) - before):
        log.warning("the recipe of this run changes: %s", changed)
    write_file(path, text)


def append_row(run: Path, *rows: Mapping[str, Any]) -> None:
    """Add a row or several to metrics.jsonl, all or none; raise OSError where there is no room."""
    with open(run / METRICS, "ab", buffering=0) as file:
        before, text = file.tell(), "".join(json.dumps(row) + "\n" for row in rows).encode()
        try:
            if file.write(text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(before)
            raise


def appended(run: Path, some: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add rows to metrics.jsonl; return those for which there is no room yet, after a warning."""
    try:
        append_row(run, *some)
    except OSError as error:  # as where a checkpoint cannot be saved, training goes on
        log.warning("%s of %s is not written (%s); training goes on", METRICS, run, error.strerror)
        return some
    return []


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl; a last line that was cut off by a crash is left out."""
    path = run / METRICS
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for line in lines if (row := _parsed(line)) is not None]


def cut_rows(run: Path, step: int) -> int:
    """Drop the rows after `step`, which will be done again; return how many steps they told of."""
    if not (run / METRICS).exists():
        return 0
    old = rows(run)
    kept = [row for row in old if row["step"] <= step]
    write_file(run / METRICS, "".join(json.dumps(row) + "\n" for row in kept))
    return max((row["step"] for row in old), default=step) - step if old else 0


def go_back(run: Path, step: int, known: int) -> int:
    """Drop the rows after `step`; return how many steps all parts of the run have to do again.

    `known`: so many of them a checkpoint tells of.
    """
    path = run / REDONE
    before = int(path.read_text()) if path.exists() else 0
    redone = max(before, known) + cut_rows(run, step)
    if redone > before:
        write_file(path, f"{redone}\n")
    return redone


def write_summary(run: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json whole or not at all."""
    write_json(run / SUMMARY, summary)


def write_json(path: Path, table: Mapping[str, Any]) -> None:
    """Write a file of JSON whole or not at all."""
    write_file(path, _as_text(table))


def write_first_summary(run: Path, summary: Mapping[str, Any]) -> bool:
    """Write summary.json unless there is one; return whether this rank was the first."""
    aside = _aside(run / SUMMARY, _as_text(summary))
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
    return json.loads(path.read_text()) if path.exists() else None


def _as_text(summary: Mapping[str, Any]) -> str:
    return json.dumps(summary, indent=2) + "\n"


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all."""
    os.replace(_aside(path, content), path)


def _aside(path: Path, content: str | bytes) -> Path:
    """Return a file of our own beside `path` that holds `content`."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}")
    with open(aside, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    return aside


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:
        return None
