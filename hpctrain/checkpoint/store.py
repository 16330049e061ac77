"""Checkpoints of a run: written to a partial folder, agreed on, renamed into place.

    RUN/checkpoints/step-00001200/             committed, by one rename of the complete folder
    RUN/checkpoints/step-00001200.2/           the same step, saved once more
    RUN/checkpoints/.step-00001300.partial/    being written; the next save removes a stale one
    RUN/checkpoints/bad-step-00001100/         found damaged by `load`, kept for inspection

A job killed at any moment leaves the checkpoints before it, and perhaps a partial one that nobody
reads. This is the one file that renames a checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpctrain.checkpoint import folder
from hpctrain.checkpoint import format as files
from hpctrain.checkpoint.format import DamagedError, Manifest, Piece
from hpctrain.collectives import all_gather_bytes
from hpctrain.core.errors import SaveError, UsageError
from hpctrain.core.files import FileError
from hpctrain.core.metrics import Metric
from hpctrain.transport.link import Link

logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A checkpoint that was read: whole arrays on every rank; `set_aside`: faults of newer ones."""

    path: Path
    step: int
    about: dict[str, Any]
    arrays: dict[str, np.ndarray]
    set_aside: list[str]


class _Outcome(NamedTuple):
    """One rank's result or fault; `damaged` if the checkpoint itself is the cause."""

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
    keep_best: Metric | None = None,
) -> Path:
    """Save `step` from the pieces of all ranks; every rank gets the path once it is committed.

    The pieces must cover each array exactly; `about` is JSON data, that of rank 0 counts. Needs
    memory for a copy of the rank's own pieces. Checkpoints older than the `keep` newest are then
    removed, except the best by `keep_best`, of the values in the `about["metrics"]` of each.
    Raises SaveError on every rank if any rank failed; the checkpoints before stay as they were.
    """
    if keep is not None and keep < 1:
        raise UsageError(f"[checkpoint] keep is {keep}; expected at least 1, or none to keep all")
    checkpoints = folder.of(run)
    partial = checkpoints / f".{files.step_name(step)}.partial"
    on_all_ranks = functools.partial(_on_all_ranks, link, partial)
    try:
        on_all_ranks(lambda: _prepare(partial) if link.rank == 0 else None)
        written = on_all_ranks(
            lambda: files.write_part(partial / files.part_name(link.rank), pieces)
        )
        parts = [files.PartFile(**part) for part, _ in written]
        # Another process, on many clusters another node, reads each part before it counts.
        peer = (link.rank + 1) % link.size
        on_all_ranks(lambda: files.check_part(partial / files.part_name(peer), parts[peer]))
        spans = [files.ArraySpan(*span) for _, spans in written for span in spans]
        manifest = functools.partial(files.manifest_of, step, parts, spans, about)
        name = on_all_ranks(lambda: _commit(partial, manifest()) if link.rank == 0 else None)[0]
    except SaveError:
        if link.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if link.rank == 0 and keep is not None:
        _prune(checkpoints, name, keep, keep_best)
    return checkpoints / name


def load(run: Path, link: Link, best: bool = False) -> Loaded | None:
    """Return the newest whole checkpoint, read by every rank, or None if none was ever written.

    With `best`: the best by the metric `keep_best` of the run. The number of ranks may differ from
    that of the save. Damaged checkpoints are renamed `bad-...`; one that only some rank cannot read
    stays, but all ranks go back to the one before, or to the next best.
    Raises UsageError if there were checkpoints and none can be used.
    """
    checkpoints = folder.of(run)
    order = _best_first if best else _newest_first
    look = _gather(link, lambda: order(Path(run)) if link.rank == 0 else None)
    if look[0].fault:
        raise UsageError(f"cannot look for checkpoints: {look[0].fault}")
    names: list[str] = look[0].value
    reasons: list[str] = []
    for name in names:
        if name.startswith("bad-"):
            continue
        loaded, reason = _try_load(checkpoints / name, reasons, link)
        if loaded is not None:
            return loaded
        reasons.append(reason)
    if names:
        raise UsageError(
            f"no checkpoint in {checkpoints} can be used: {'; '.join(reasons or names)}; put a "
            "good copy there as step-NNNNNNNN, or start anew in another --out"
        )
    return None


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is a checkpoint's own folder, rather than a run's."""
    return os.path.lexists(path / files.MANIFEST)


def read(path: Path) -> Loaded:
    """Return the checkpoint at `path`; raise UsageError if it is damaged, and leave it there."""
    try:
        return _loaded(path, [])
    except (DamagedError, OSError) as error:
        raise UsageError(f"{path} cannot be used: {error}") from None


def best_value(run: Path, metric: Metric, link: Link) -> float | None:
    """Return the value of the best whole checkpoint, None if there is none; collective.

    Rank 0 reads it: a damaged best checkpoint is set aside, and the next one takes its place.
    """
    report = _gather(link, lambda: _best_intact(run, metric) if link.rank == 0 else None)[0]
    if report.fault:
        raise UsageError(f"cannot look for the best checkpoint: {report.fault}")
    return report.value


def verify(path: Path) -> str | None:
    """Return the fault of the checkpoint at `path`, or None; reads and hashes all files."""
    try:
        folder.must_be_folder(path)
        files.read(path, with_arrays=False)
    except (DamagedError, UsageError, OSError) as error:
        return str(error)
    return None


def _prepare(partial: Path) -> None:
    checkpoints = partial.parent
    checkpoints.mkdir(parents=True, exist_ok=True)
    files.sync(checkpoints.parent)
    _remove_partial(checkpoints)
    partial.mkdir()


def sweep(run: Path) -> None:
    """Remove the partial checkpoints in `run`, which the caller has locked; warn if any stay."""
    try:
        _remove_partial(folder.of(run))
    except OSError as error:
        logger.warning("partial checkpoints stay: %s", error)


def _remove_partial(checkpoints: Path) -> None:
    for left in checkpoints.glob(".step-*.partial"):
        _remove(left)


def _remove(left: Path) -> None:
    """Remove a folder that nobody reads, or a file or link in its place."""
    if left.is_dir() and not left.is_symlink():
        shutil.rmtree(left, ignore_errors=True)
    else:
        left.unlink()


def _commit(partial: Path, manifest: Manifest) -> str:
    files.write_manifest(partial, manifest)
    files.read_manifest(partial)
    path = folder.vacant(partial.parent, manifest.step, bad=False)
    os.rename(partial, path)  # from here on it counts
    files.sync(partial.parent)
    return path.name


def _prune(checkpoints: Path, newest: str, keep: int, keep_best: Metric | None) -> None:
    try:
        whole = [entry.name for entry in folder.scan(checkpoints) if not entry.bad]
        names = [name for name in whole if _is_folder(checkpoints / name)]
        best = _best(checkpoints.parent, keep_best)[:1] if keep_best else []
        for name in (name for name in names[names.index(newest) + keep :] if name not in best):
            # Renamed in one step, so that a half removed one never passes for a damaged one.
            renamed = checkpoints / f".{name}.partial"
            os.rename(checkpoints / name, renamed)
            shutil.rmtree(renamed)
    except (OSError, FileError) as error:
        logger.warning("old checkpoints stay: %s", error)


def _is_folder(path: Path) -> bool:
    """Return whether `path` is a folder, as `save` creates: no link and no file."""
    return path.is_dir() and not path.is_symlink()


def _newest_first(run: Path) -> list[str]:
    return [entry.name for entry in folder.scan(folder.of(run))]


def _best(run: Path, metric: Metric) -> list[str]:
    return [saved.path.name for saved in folder.ranked(folder.listing(run), metric)]


def _best_first(run: Path) -> list[str]:
    metric = folder.best_metric(folder.listing(run))
    names = _best(run, metric) if metric else []
    if not names:
        raise UsageError(
            f"{run} keeps no best checkpoint; train with [checkpoint] keep_best, such as "
            'keep_best = "test_accuracy"'
        )
    return names


def _best_intact(run: Path, metric: Metric) -> float | None:
    for saved in folder.ranked(folder.listing(run), metric):
        try:
            files.read(saved.path, with_arrays=False)
            return folder.value_of(saved, metric)
        except DamagedError as error:
            _rename_bad(saved.path)
            logger.warning("the best checkpoint is damaged, set aside: %s", error)
        except (UsageError, OSError) as error:
            logger.warning("the best checkpoint cannot be read: %s", error)
    return None


def _try_load(path: Path, reasons: list[str], link: Link) -> tuple[Loaded | None, str]:
    read: list[Loaded] = []
    reports = _gather(link, lambda: read.append(_loaded(path, reasons)))
    faults = _faults(reports)
    if not faults:
        if reasons and link.rank == 0:
            logger.warning("%s; going back to %s", "; ".join(reasons), path)
        return read[0], ""
    # If it is whole on rank 0, another rank's node merely cannot read it.
    if reports[0].damaged and link.rank == 0:
        _rename_bad(path)
    state = "is damaged, set aside" if reports[0].damaged else "cannot be read"
    return None, f"{path.name} {state} ({faults})"


def _loaded(path: Path, reasons: list[str]) -> Loaded:
    folder.must_be_folder(path)
    manifest, arrays = files.read(path, with_arrays=True)
    return Loaded(path, manifest.step, manifest.about, arrays, list(reasons))


def _rename_bad(path: Path) -> None:
    with contextlib.suppress(OSError):  # the file system may be read-only
        step = int(files.NAME.fullmatch(path.name)[2])  # type: ignore[index]
        os.rename(path, folder.vacant(path.parent, step, bad=True))
        files.sync(path.parent)


def _gather(link: Link, act: Callable[[], Any]) -> list[_Outcome]:
    try:
        payload = json.dumps(_Outcome(act()))
    except Exception as error:  # the other ranks wait for this rank's report
        logger.debug("reported to all ranks:", exc_info=True)
        fault = _fault_of(link.rank, error)
        payload = json.dumps(_Outcome(None, fault, isinstance(error, DamagedError)))
    return [_Outcome(*json.loads(reply)) for reply in all_gather_bytes(link, payload.encode())]


def _faults(reports: list[_Outcome]) -> str:
    faults = [report.fault for report in reports if report.fault]
    rest = f" (and {len(faults) - 3} more ranks)" if len(faults) > 3 else ""
    return "; ".join(faults[:3]) + rest


def _fault_of(rank: int, error: Exception) -> str:
    kind = (
        ""
        if isinstance(error, (OSError, DamagedError, UsageError))
        else f"{type(error).__name__}: "
    )
    return f"rank {rank} on {socket.gethostname()}: {kind}{error}"


def _on_all_ranks(link: Link, partial: Path, act: Callable[[], Any]) -> list[Any]:
    reports = _gather(link, act)
    if faults := _faults(reports):
        remaining = _newest_remaining(partial.parent)
        raise SaveError(f"could not save {partial}: {faults}; {remaining}")
    return [report.value for report in reports]


def _newest_remaining(checkpoints: Path) -> str:
    try:
        names = [entry.name for entry in folder.scan(checkpoints) if not entry.bad]
    except FileError:  # this rank cannot list the folder
        return f"those in {checkpoints} were not touched"
    newest = next((name for name in names if _is_folder(checkpoints / name)), None)
    return f"still good: {checkpoints / newest}" if newest else "there was none before it"
