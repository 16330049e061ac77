"""Checkpoints of a run: written aside, agreed on, renamed into place; read back only if whole.

    RUN/checkpoints/step-00001200/             committed: one rename, when all is in it, makes it
    RUN/checkpoints/step-00001200.2/           the same step, saved once more
    RUN/checkpoints/.step-00001300.partial/    being written; a killed job's goes at the next save
    RUN/checkpoints/bad-step-00001100/         found damaged by `load`, kept for a person to see

A job killed at any moment leaves the checkpoints before it and perhaps a partial one that no one
reads. This is the one file that renames a checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpctrain.checkpoint import format as files
from hpctrain.checkpoint.format import Damaged, Manifest, Piece
from hpctrain.collectives import all_gather_bytes
from hpctrain.errors import SaveError, UsageError
from hpctrain.transport.link import Link

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(bad-)?step-(\d{8,})(?:\.(\d+))?")


class Loaded(NamedTuple):
    """A checkpoint that was read: whole arrays on every rank, and why newer ones were not used."""

    path: Path
    step: int
    about: dict[str, Any]
    arrays: dict[str, np.ndarray]
    set_aside: list[str]


class Found(NamedTuple):
    """A checkpoint on the disk, its parts unread; `about` is None if its manifest is bad."""

    path: Path
    step: int
    size_bytes: int
    about: dict[str, Any] | None
    set_aside: bool


class _Entry(NamedTuple):
    """A checkpoint's directory as its name tells; sorted from old to new."""

    step: int
    revision: int
    name: str
    bad: bool


class _Report(NamedTuple):
    """What one rank got, or why it failed; `damaged` if the checkpoint itself is to blame."""

    value: Any
    fault: str | None = None
    damaged: bool = False


def save(
    run: Path,
    step: int,
    pieces: Sequence[Piece],
    about: dict[str, Any],
    link: Link,
    keep: int | None = None,
) -> Path:
    """Save `step` from the pieces of all ranks; every rank gets the path once it is committed.

    The pieces must cover each array exactly; `about` is JSON data, that of rank 0 counts. Needs
    memory for a copy of the rank's own pieces. Older checkpoints than the `keep` newest go then.
    Raises SaveError on every rank if any rank failed; the checkpoints before stay as they were.
    """
    if keep is not None and keep < 1:
        raise UsageError(f"[checkpoint] keep is {keep}; expected at least 1, or none to keep all")
    checkpoints = Path(run) / "checkpoints"
    partial = checkpoints / f".{files.step_name(step)}.partial"
    together = functools.partial(_all_or_none, link, partial)
    try:
        together(lambda: _prepare(partial) if link.rank == 0 else None)
        written = together(lambda: files.write_part(partial / files.part_name(link.rank), pieces))
        parts = [files.Part(**part) for part, _ in written]
        # Another process, on many clusters another node, reads each part before it counts.
        peer = (link.rank + 1) % link.size
        together(lambda: files.check_part(partial / files.part_name(peer), parts[peer]))
        spans = [files.Span(*span) for _, spans in written for span in spans]
        manifest = functools.partial(files.manifest_of, step, parts, spans, about)
        name = together(lambda: _commit(partial, manifest()) if link.rank == 0 else None)[0]
    except SaveError:
        if link.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if link.rank == 0 and keep is not None:
        _prune(checkpoints, name, keep)
    return checkpoints / name


def load(run: Path, link: Link) -> Loaded | None:
    """Return the newest whole checkpoint, read by every rank, or None if none was ever written.

    Any number of ranks may load what any other number saved. Damaged ones are renamed `bad-...`;
    one that only some rank cannot read stays, but all ranks go back to the one before.
    Raises UsageError if there were checkpoints and none can be used.
    """
    checkpoints = Path(run) / "checkpoints"
    look = _gather(link, lambda: _scan(checkpoints) if link.rank == 0 else None)
    if look[0].fault:
        raise UsageError(f"cannot look for checkpoints: {look[0].fault}")
    entries = [_Entry(*entry) for entry in look[0].value]
    reasons: list[str] = []
    for entry in (entry for entry in entries if not entry.bad):
        loaded, reason = _load_one(checkpoints / entry.name, reasons, link)
        if loaded is not None:
            return loaded
        reasons.append(reason)
    if entries:
        names = "; ".join(reasons) or ", ".join(entry.name for entry in entries)
        raise UsageError(
            f"no checkpoint in {checkpoints} can be used: {names}; put a good copy there as "
            "step-NNNNNNNN, or start anew in another --out"
        )
    return None


def listing(run: Path) -> list[Found]:
    """Return the checkpoints of a run, oldest first, set-aside ones too."""
    checkpoints = Path(run) / "checkpoints"
    return [_found(checkpoints / entry.name, entry) for entry in reversed(_scan(checkpoints))]


def verify(path: Path) -> str | None:
    """Return what is wrong with the checkpoint at `path`, or None; reads and hashes every part."""
    try:
        files.read(Path(path), wanted=False)
    except (Damaged, UsageError, OSError) as error:
        return str(error)
    return None


def _prepare(partial: Path) -> None:
    checkpoints = partial.parent
    checkpoints.mkdir(parents=True, exist_ok=True)
    files.sync(checkpoints.parent)
    for left in checkpoints.glob(".step-*.partial"):
        shutil.rmtree(left)
    partial.mkdir()


def _commit(partial: Path, manifest: Manifest) -> str:
    files.write_manifest(partial, manifest)
    files.read_manifest(partial)
    path = _vacant(partial.parent, manifest.step, bad=False)
    os.rename(partial, path)  # from here on it counts
    files.sync(partial.parent)
    return path.name


def _prune(checkpoints: Path, newest: str, keep: int) -> None:
    try:
        names = [entry.name for entry in _scan(checkpoints) if not entry.bad]
        for name in names[names.index(newest) + keep :]:
            # In one step out of sight, so that one half removed is never taken for a damaged one.
            gone = checkpoints / f".{name}.partial"
            os.rename(checkpoints / name, gone)
            shutil.rmtree(gone)
    except OSError as error:
        logger.warning("old checkpoints stay: %s", error)


def _load_one(path: Path, reasons: list[str], link: Link) -> tuple[Loaded | None, str]:
    read: list[Loaded] = []
    reports = _gather(link, lambda: read.append(_loaded(path, reasons)))
    faults = _faults(reports)
    if not faults:
        if reasons and link.rank == 0:
            logger.warning("%s; going back to %s", "; ".join(reasons), path)
        return read[0], ""
    # What rank 0 finds whole, another rank's node merely cannot see.
    if reports[0].damaged and link.rank == 0:
        _set_aside(path)
    where = "is damaged, set aside" if reports[0].damaged else "cannot be read"
    return None, f"{path.name} {where} ({faults})"


def _loaded(path: Path, reasons: list[str]) -> Loaded:
    manifest, arrays = files.read(path, wanted=True)
    return Loaded(path, manifest.step, manifest.about, arrays, list(reasons))


def _set_aside(path: Path) -> None:
    with contextlib.suppress(OSError):  # a run may be read where nothing can be written
        step = int(_NAME.fullmatch(path.name)[2])  # type: ignore[index]
        os.rename(path, _vacant(path.parent, step, bad=True))
        files.sync(path.parent)


def _found(path: Path, entry: _Entry) -> Found:
    size_bytes = sum(file.stat().st_size for file in path.iterdir())
    try:
        about = files.read_manifest(path).about
    except (Damaged, UsageError, OSError):
        about = None
    return Found(path, entry.step, size_bytes, about, entry.bad)


def _gather(link: Link, act: Callable[[], Any]) -> list[_Report]:
    try:
        payload = json.dumps(_Report(act()))
    except Exception as error:  # the others wait for this rank's word, whatever went wrong
        logger.debug("told to all ranks:", exc_info=True)
        fault = _told(link.rank, error)
        payload = json.dumps(_Report(None, fault, isinstance(error, Damaged)))
    return [_Report(*json.loads(seen)) for seen in all_gather_bytes(link, payload.encode())]


def _faults(reports: list[_Report]) -> str:
    faults = [report.fault for report in reports if report.fault]
    more = f" (and {len(faults) - 3} more ranks)" if len(faults) > 3 else ""
    return "; ".join(faults[:3]) + more


def _told(rank: int, error: Exception) -> str:
    kind = "" if isinstance(error, (OSError, Damaged, UsageError)) else f"{type(error).__name__}: "
    return f"rank {rank} on {socket.gethostname()}: {kind}{error}"


def _all_or_none(link: Link, partial: Path, act: Callable[[], Any]) -> list[Any]:
    reports = _gather(link, act)
    if faults := _faults(reports):
        standing = _standing(partial.parent)
        raise SaveError(f"could not save {partial}: {faults}; {standing}")
    return [report.value for report in reports]


def _standing(checkpoints: Path) -> str:
    try:
        newest = [entry.name for entry in _scan(checkpoints) if not entry.bad][:1]
    except OSError:  # the disk has more to tell than this rank can read
        return f"those in {checkpoints} were not touched"
    return f"still good: {checkpoints / newest[0]}" if newest else "there was none before it"


def _scan(checkpoints: Path) -> list[_Entry]:
    if not checkpoints.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in checkpoints.iterdir() if path.is_dir())
    entries = [_Entry(int(m[2]), int(m[3] or 1), m[0], bool(m[1])) for m in found if m]
    return sorted(entries, reverse=True)


def _vacant(checkpoints: Path, step: int, bad: bool) -> Path:
    # Never a number that was free again: the newest revision must stay the newest.
    taken = [e.revision for e in _scan(checkpoints) if (e.step, e.bad) == (step, bad)]
    revision = f".{max(taken) + 1}" if taken else ""
    return checkpoints / f"{'bad-' if bad else ''}{files.step_name(step)}{revision}"
