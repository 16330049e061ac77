"""What lies in a run's folder of checkpoints: told by names and manifests, no part is read.

Each manifest holds the metrics of its own step. So which checkpoint is the best is written nowhere
and cannot be wrong: where it is lost or damaged, the best of those that are left is the best.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.checkpoint import format as files
from hpctrain.checkpoint.format import NAME, Damaged
from hpctrain.errors import UsageError
from hpctrain.files import FileError
from hpctrain.metrics import METRICS, Metric, goodness


class Found(NamedTuple):
    """A checkpoint on the disk, its parts unread; `about` is None if its manifest is bad."""

    path: Path
    step: int
    size_bytes: int
    about: dict[str, Any] | None
    set_aside: bool
    fault: str = ""  #: why it cannot be used


class Entry(NamedTuple):
    """A checkpoint's directory as its name tells; sorted from old to new."""

    step: int
    revision: int
    name: str
    bad: bool


def of(run: Path) -> Path:
    """Return the folder in which the checkpoints of `run` lie."""
    return Path(run) / "checkpoints"


def scan(checkpoints: Path) -> list[Entry]:
    """Return the checkpoints by their names, newest first, whatever lies there under such a name.

    Raises FileError if there is something else than a folder that can be read: checkpoints that are
    out of reach, as those of a file system that is not mounted, are not "none yet".
    """
    try:
        names = os.listdir(checkpoints)
    except FileNotFoundError as error:
        if not checkpoints.is_symlink():
            return []
        raise _out_of_reach(
            checkpoints, f"a link to {os.readlink(checkpoints)}, missing"
        ) from error
    except OSError as error:
        raise _out_of_reach(checkpoints, str(error.strerror).lower()) from error
    found = map(NAME.fullmatch, names)
    entries = [Entry(int(m[2]), int(m[3] or 1), m[0], bool(m[1])) for m in found if m]
    return sorted(entries, reverse=True)


def _out_of_reach(checkpoints: Path, seen: str) -> FileError:
    return FileError(
        f"{checkpoints}: expected a folder of checkpoints, seen {seen}; nothing was "
        "changed. Make it readable, or start anew in another --out"
    )


def must_be_folder(path: Path) -> None:
    """Raise FileError unless `path` is a folder that can be read, or a link to one."""
    try:
        os.listdir(path)
    except FileNotFoundError:
        kind = f"a link to {os.readlink(path)}, missing" if path.is_symlink() else "nothing"
        raise FileError(f"{path}: expected a folder, seen {kind}") from None
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from None


def vacant(checkpoints: Path, step: int, bad: bool) -> Path:
    """Return the path that a checkpoint of `step` takes next."""
    # Never a number that was free again: the newest revision must stay the newest.
    taken = [e.revision for e in scan(checkpoints) if (e.step, e.bad) == (step, bad)]
    revision = f".{max(taken) + 1}" if taken else ""
    return checkpoints / f"{'bad-' if bad else ''}{files.step_name(step)}{revision}"


def listing(run: Path) -> list[Found]:
    """Return the checkpoints of a run, oldest first, set-aside ones too."""
    checkpoints = of(run)
    return [_found(checkpoints / entry.name, entry) for entry in reversed(scan(checkpoints))]


def kept_best(found: Sequence[Found]) -> Metric | None:
    """Return the metric whose best value the newest checkpoint says is kept, None for none."""
    told = [one.about.get("keep_best") for one in found if one.about and not one.set_aside]
    return told[-1] if told and told[-1] in METRICS else None


def value_of(found: Found, metric: Metric) -> float | None:
    """Return the metric at the checkpoint's own step, None where it was not finite or not made."""
    value = ((found.about or {}).get("metrics") or {}).get(metric)
    usable = isinstance(value, float | int) and isfinite(value) and not found.set_aside
    return value if usable else None


def ranked(found: Sequence[Found], metric: Metric) -> list[Found]:
    """Return those that have a value of `metric`, best first; of equals the earliest step."""
    valued = [
        (goodness(metric, value), -one.step, i, one)
        for i, one in enumerate(found)
        if (value := value_of(one, metric)) is not None
    ]
    return [one for *_, one in sorted(valued, key=lambda row: row[:3], reverse=True)]


def _found(path: Path, entry: Entry) -> Found:
    try:
        must_be_folder(path)
        about, fault = files.read_manifest(path).about, ""
    except (Damaged, UsageError, OSError) as error:
        about, fault = None, str(error)
    return Found(path, entry.step, _size_bytes(path), about, entry.bad, fault)


def _size_bytes(path: Path) -> int:
    """Return the bytes of the files in a folder, 0 where it cannot be read."""
    try:
        return sum(file.lstat().st_size for file in path.iterdir())
    except OSError:
        return 0
