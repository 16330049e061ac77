"""Loading the checkpoint that a run goes on from: the newest, or the best, that is whole.

A checkpoint that is found damaged is renamed `bad-...` and kept for inspection; all ranks go back
to its predecessor.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpctrain.checkpoint import folder, manifest, parts
from hpctrain.checkpoint.agreement import (
    RankResult,
    broadcast_from_first,
    gather_results,
    join_faults,
)
from hpctrain.checkpoint.format import NAME, DamagedError, params_sha256
from hpctrain.checkpoint.reader import FileReader
from hpctrain.checkpoint.requests import Reader
from hpctrain.core.errors import UsageError
from hpctrain.core.metrics import Criterion
from hpctrain.transport.link import Link

logger = logging.getLogger(__name__)
RequestArrays = Callable[[Reader], None]


class Loaded(NamedTuple):
    """A checkpoint that was loaded, and the arrays that were requested whole.

    `set_aside`: the faults of newer ones. `params_sha256`: the hash of its parameters by the
    manifest, None if no tensors are named.
    """

    path: Path
    step: int
    about: dict[str, Any]
    state: dict[str, int | str]
    arrays: dict[str, np.ndarray]
    params_sha256: str | None
    set_aside: list[str]


def load(
    run: Path, link: Link, best: bool = False, request: RequestArrays | None = None
) -> Loaded | None:
    """Load the newest whole checkpoint, or return None if none was ever written; collective.

    `request(reader)`, on every rank, requests the arrays that this rank needs, every array whole if
    it is None; they have arrived when `load` returns. An error that it raises must be raised on all
    ranks. With `best`: the best by the metric `keep_best` of the run. Another number of ranks than
    at the save is fine. Damaged checkpoints are renamed `bad-...`; a checkpoint that only some rank
    cannot read stays, but all ranks go back to its predecessor, or to the next best, and request
    anew. Raises UsageError if there were checkpoints and none can be used.
    """
    checkpoints = folder.of(run)
    list_names = _best_first if best else _newest_first
    names_results = gather_results(link, lambda: list_names(Path(run)) if link.rank == 0 else None)
    if names_results[0].fault:
        raise UsageError(f"cannot look for checkpoints: {names_results[0].fault}")
    names: list[str] = names_results[0].value
    reasons: list[str] = []
    for name in names:
        if name.startswith("bad-"):
            continue
        loaded, results = _try_load(checkpoints / name, link, request, reasons)
        if loaded is not None:
            return loaded
        reasons.append(_set_aside(checkpoints / name, link, results))
    if names:
        raise UsageError(
            f"no checkpoint in {checkpoints} can be used: {'; '.join(reasons or names)}; put a "
            "good copy there as step-NNNNNNNN, or start anew in another --out"
        )
    return None


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is a checkpoint's own folder, rather than a run's."""
    return os.path.lexists(path / manifest.MANIFEST)


def read(path: Path, link: Link, request: RequestArrays | None = None) -> Loaded:
    """Load the checkpoint at `path`, see `load`; raise UsageError if it is damaged."""
    path = path.resolve()  # a user may name it by a link
    loaded, results = _try_load(path, link, request, [])
    if loaded is None:
        raise UsageError(f"{path} cannot be used: {join_faults(results)}")
    return loaded


def best_value(
    run: Path, criterion: Criterion, link: Link, verified_path: Path | None = None
) -> float | None:
    """Return the value of the best whole checkpoint, None if there is none; collective.

    Rank 0 reads it, unless it is `verified_path`, which was read before. A damaged checkpoint is
    set aside, and the next best one takes its place.
    """
    result = gather_results(
        link, lambda: _find_best_value(run, criterion, verified_path) if link.rank == 0 else None
    )[0]
    if result.fault:
        raise UsageError(f"cannot look for the best checkpoint: {result.fault}")
    return result.value


def verify(path: Path) -> str | None:
    """Return the fault of the checkpoint at `path`, or None; reads and hashes all files."""
    try:
        folder.must_be_folder(path)
        _check_files(path)
    except (DamagedError, UsageError, OSError) as error:
        return str(error)
    return None


def _newest_first(run: Path) -> list[str]:
    return [entry.name for entry in folder.scan(folder.of(run))]


def _best_first(run: Path) -> list[str]:
    criterion = folder.best_criterion(folder.listing(run))
    names = (
        [saved.path.name for saved in folder.rank_by(folder.listing(run), criterion)]
        if criterion
        else []
    )
    if not names:
        raise UsageError(
            f"{run} keeps no best checkpoint; train with [checkpoint] keep_best, such as "
            'keep_best = "test_accuracy"'
        )
    return names


def _find_best_value(run: Path, criterion: Criterion, verified_path: Path | None) -> float | None:
    for saved in folder.rank_by(folder.listing(run), criterion):
        try:
            if saved.path != verified_path:
                _check_files(saved.path)
            return folder.metric_value(saved, criterion.metric)
        except DamagedError as error:
            _rename_damaged(saved.path)
            logger.warning("the best checkpoint is damaged, set aside: %s", error)
        except (UsageError, OSError) as error:
            logger.warning("the best checkpoint cannot be read: %s", error)
    return None


def _try_load(
    path: Path, link: Link, request: RequestArrays | None, reasons: list[str]
) -> tuple[Loaded | None, list[RankResult]]:
    """Return the checkpoint at `path`, or None and each rank's result about its faults."""
    data, results = broadcast_from_first(link, lambda: _encode_manifest(path))
    if join_faults(results):
        return None, results
    entries = manifest.parse(data)
    reader = FileReader(path, entries)
    (request or _request_all)(reader)
    results = gather_results(link, lambda: reader.fetch(link))
    if join_faults(results):
        return None, results
    reader.finish()
    if reasons and link.rank == 0:
        logger.warning("%s; going back to %s", "; ".join(reasons), path)
    sha256, reasons = params_sha256(entries), list(reasons)
    return Loaded(path, reader.step, reader.about, reader.state, reader.arrays, sha256, reasons), []


def _encode_manifest(path: Path) -> bytes:
    """Return the manifest of a checkpoint as JSON, after a check of the sizes of its parts."""
    folder.must_be_folder(path)
    entries = manifest.read(path)
    parts.check_sizes(path, entries)
    return json.dumps(asdict(entries)).encode()


def _request_all(reader: Reader) -> None:
    reader.request_whole(reader.sizes)


def _set_aside(path: Path, link: Link, results: list[RankResult]) -> str:
    """Rename a damaged checkpoint; return the reason why it cannot be used; collective."""
    is_damaged = any(result.damaged for result in results)
    # If it is whole on rank 0, another rank's node merely cannot read it.
    rename_results = gather_results(
        link, lambda: _rename_if_damaged(path) if is_damaged and link.rank == 0 else False
    )
    state_text = "is damaged, set aside" if rename_results[0].value else "cannot be read"
    return f"{path.name} {state_text} ({join_faults(results)})"


def _rename_if_damaged(path: Path) -> bool:
    try:
        _check_files(path)
    except DamagedError:
        _rename_damaged(path)
        return True
    return False


def _check_files(path: Path) -> None:
    """Raise DamagedError unless all files of a checkpoint are whole."""
    entries = manifest.read(path)
    parts.check_sizes(path, entries)
    for part in entries.parts:
        parts.check_part(path, part, entries.arrays, entries.edges)


def _rename_damaged(path: Path) -> None:
    with contextlib.suppress(OSError):  # the file system may be read-only
        step = int(NAME.fullmatch(path.name)[2])  # type: ignore[index]
        os.rename(path, folder.vacant_path(path.parent, step, bad=True))
        parts.sync(path.parent)
