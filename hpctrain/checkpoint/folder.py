"""The checkpoints in a run's folder, by names and manifests alone: no part is read.

Each manifest holds the metrics of its own step. So no file names the best checkpoint, and none can
be wrong: if the best checkpoint is lost or damaged, the next best takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.checkpoint import manifest
from hpctrain.checkpoint.format import NAME, DamagedError, step_name
from hpctrain.core.errors import UsageError
from hpctrain.core.files import FileError, unreadable
from hpctrain.core.metrics import Criterion
from hpctrain.core.opening import names_in


class SavedCheckpoint(NamedTuple):
    """A checkpoint on the disk, its parts unread; `about` is None if its manifest is bad."""

    path: Path
    step: int
    size_bytes: int
    about: dict[str, Any] | None
    set_aside: bool
    fault: str = ""  #: the reason why it cannot be used


class CheckpointName(NamedTuple):
    """A checkpoint's directory, parsed from its name; sorted from old to new."""

    step: int
    revision: int
    name: str
    bad: bool


def of(run: Path) -> Path:
    """Return the folder in which the checkpoints of `run` lie."""
    return Path(run) / "checkpoints"


def scan(checkpoints: Path) -> list[CheckpointName]:
    """Return the checkpoints by their names, newest first; what lies under a name is not examined.

    Raises FileError if `checkpoints` exists but is no readable folder: checkpoints out of reach, as
    on a file system that is not mounted, must not pass for "none yet".
    """
    try:
        names = names_in(checkpoints)
    except FileNotFoundError:
        return []
    except OSError as error:
        actual = str(error.strerror).rpartition("seen ")[2]
        raise FileError(
            f"{checkpoints}: expected a folder of checkpoints, seen {actual}; nothing was "
            "changed. Make it readable, or start anew in another --out"
        ) from error
    matches = map(NAME.fullmatch, names)
    entries = [CheckpointName(int(m[2]), int(m[3] or 1), m[0], bool(m[1])) for m in matches if m]
    return sorted(entries, reverse=True)


def must_be_folder(path: Path) -> None:
    """Raise FileError unless `path` is a folder that can be read, of a run's checkpoints."""
    try:
        names_in(path, 2)
    except FileNotFoundError:
        raise FileError(f"{path}: expected a folder, seen nothing") from None
    except OSError as error:
        raise unreadable(path, error) from None


def vacant_path(checkpoints: Path, step: int, bad: bool) -> Path:
    """Return the free path for the next checkpoint of `step`."""
    # Never reuse the number of a removed one: the newest revision must stay the newest.
    revisions = [e.revision for e in scan(checkpoints) if (e.step, e.bad) == (step, bad)]
    suffix = f".{max(revisions) + 1}" if revisions else ""
    return checkpoints / f"{'bad-' if bad else ''}{step_name(step)}{suffix}"


def listing(run: Path) -> list[SavedCheckpoint]:
    """Return the checkpoints of a run, oldest first, set-aside ones too."""
    checkpoints = of(run)
    return [_summarize(checkpoints / entry.name, entry) for entry in reversed(scan(checkpoints))]


def best_criterion(checkpoints: Sequence[SavedCheckpoint]) -> Criterion | None:
    """Return the criterion `keep_best` of the newest checkpoint, None if it has none."""
    criteria = [
        saved.about.get("keep_best") for saved in checkpoints if saved.about and not saved.set_aside
    ]
    return Criterion(**criteria[-1]) if criteria and criteria[-1] else None


def metric_value(saved: SavedCheckpoint, metric: str) -> float | None:
    """Return the metric at the checkpoint's own step, None if not finite or not evaluated."""
    value = ((saved.about or {}).get("metrics") or {}).get(metric)
    is_usable = isinstance(value, float | int) and isfinite(value) and not saved.set_aside
    return value if is_usable else None


def rank_by(checkpoints: Sequence[SavedCheckpoint], criterion: Criterion) -> list[SavedCheckpoint]:
    """Return the checkpoints with a value of the metric, best first; of equals the earliest."""
    ranking = [
        (criterion.goodness(value), -saved.step, i, saved)
        for i, saved in enumerate(checkpoints)
        if (value := metric_value(saved, criterion.metric)) is not None
    ]
    return [saved for *_, saved in sorted(ranking, key=lambda row: row[:3], reverse=True)]


def _summarize(path: Path, entry: CheckpointName) -> SavedCheckpoint:
    try:
        must_be_folder(path)
        about, fault = manifest.read(path).about, ""
    except (DamagedError, UsageError, OSError) as error:
        about, fault = None, str(error)
    return SavedCheckpoint(path, entry.step, _size_bytes(path), about, entry.bad, fault)


def _size_bytes(path: Path) -> int:
    """Return the bytes of the files in a folder, 0 if it cannot be read."""
    try:
        return sum(file.lstat().st_size for file in path.iterdir())
    except OSError:
        return 0
