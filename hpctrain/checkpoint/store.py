"""Checkpoints of a run: written to a partial folder, agreed on, renamed into place.

    RUN/checkpoints/step-00001200/             committed, by one rename of the complete folder
    RUN/checkpoints/step-00001200.2/           the same step, saved once more
    RUN/checkpoints/.step-00001300.partial/    being written; the next save removes a stale one
    RUN/checkpoints/bad-step-00001100/         found damaged, see restore.py, kept for inspection

A job killed at any moment leaves the checkpoints before it, and perhaps a partial one that nobody
reads. This file and restore.py, which sets damaged ones aside, are those that rename checkpoints.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.checkpoint import folder, manifest, parts
from hpctrain.checkpoint.agreement import (
    RankResult,
    broadcast_from_first,
    gather_results,
    join_faults,
)
from hpctrain.checkpoint.format import (
    Contribution,
    Piece,
    SlotEdges,
    merge_arrays,
    part_from_table,
    slot_spans,
    step_name,
)
from hpctrain.checkpoint.hashes import distinct_bounds
from hpctrain.core import opening
from hpctrain.core.errors import SaveError, UsageError
from hpctrain.core.files import FileError
from hpctrain.core.metrics import Criterion
from hpctrain.transport.link import Link

logger = logging.getLogger(__name__)


def save(
    run: Path,
    step: int,
    pieces: Sequence[Piece],
    about: dict[str, Any],
    link: Link,
    keep: int | None = None,
    keep_best: Criterion | None = None,
    state: Mapping[str, int | str] | None = None,
) -> Path:
    """Save `step` from the ranks' pieces; every rank gets the path once it is committed.

    The pieces must cover each array exactly; `about` is JSON data, taken from rank 0; the entries
    of `state`, which are no arrays, are merged over the ranks. Needs memory for one extent.
    Checkpoints older than the `keep` newest are then removed, except the best by `keep_best`, a
    metric in `about["metrics"]`. Raises SaveError on every rank if any rank failed; the checkpoints
    before stay as they were.
    """
    if keep is not None and keep < 1:
        raise UsageError(f"[checkpoint] keep is {keep}; expected at least 1, or none to keep all")
    checkpoints = folder.of(run)
    partial = checkpoints / f".{step_name(step)}.partial"
    on_all_ranks = functools.partial(_on_all_ranks, link, partial)
    try:
        # Rank 0 alone gives the edges at which all ranks cut arrays.
        data, results = broadcast_from_first(link, lambda: _create_partial_folder(partial, about))
        _raise_faults(results, partial)
        slot_edges: SlotEdges = json.loads(data)
        part = partial / f"part-{link.rank:05d}.safetensors"
        tables = on_all_ranks(lambda: parts.write_part(part, pieces, slot_edges, state or {}))
        written = [Contribution(*table) for table in tables]
        # Another process, on many clusters another node, reads each part before it counts.
        peer = written[(link.rank + 1) % link.size]
        on_all_ranks(
            lambda: parts.check_part(
                partial, part_from_table(peer.part), merge_arrays([peer]), slot_edges
            )
        )
        commit = functools.partial(_commit, partial, step, written, about)
        name = on_all_ranks(lambda: commit() if link.rank == 0 else None)[0]
    except SaveError:
        if link.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if link.rank == 0 and keep is not None:
        _prune(checkpoints, name, keep, keep_best)
    return checkpoints / name


def sweep(run: Path) -> None:
    """Remove the partial checkpoints in `run`, which the caller has locked; warn if any stay."""
    try:
        _remove_partial(folder.of(run))
    except OSError as error:
        logger.warning("partial checkpoints stay: %s", error)


def _create_partial_folder(partial: Path, about: Mapping[str, Any]) -> bytes:
    """Create the folder of a checkpoint; return the edges of its slots as JSON."""
    checkpoints = partial.parent
    checkpoints.parent.mkdir(parents=True, exist_ok=True)
    opening.make_folder(checkpoints)
    parts.sync(checkpoints.parent)
    _remove_partial(checkpoints)
    partial.mkdir()
    return json.dumps(
        {name: distinct_bounds(spans) for name, spans in slot_spans(about).items()}
    ).encode()


def _remove_partial(checkpoints: Path) -> None:
    with suppress(FileNotFoundError):
        for name in fnmatch.filter(opening.names_in(checkpoints), ".step-*.partial"):
            if _is_folder(leftover := checkpoints / name):  # which nobody reads
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink()


def _commit(
    partial: Path, step: int, written: Sequence[Contribution], about: dict[str, Any]
) -> str:
    data = manifest.to_bytes(manifest.assemble(step, written, about))
    with parts.create_file(partial / manifest.MANIFEST) as write:
        write(data)
    parts.sync(partial)
    manifest.read(partial)
    path = folder.vacant_path(partial.parent, step, bad=False)
    os.rename(partial, path)  # from here on it counts
    parts.sync(partial.parent)
    return path.name


def _prune(checkpoints: Path, newest: str, keep: int, keep_best: Criterion | None) -> None:
    try:
        intact = [entry.name for entry in folder.scan(checkpoints) if not entry.bad]
        names = [name for name in intact if _is_folder(checkpoints / name)]
        run = checkpoints.parent
        saved = folder.rank_by(folder.listing(run), keep_best) if keep_best else []
        best = [entry.path.name for entry in saved[:1]]
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


def _on_all_ranks(link: Link, partial: Path, call: Callable[[], Any]) -> list[Any]:
    results = gather_results(link, call)
    _raise_faults(results, partial)
    return [result.value for result in results]


def _raise_faults(results: Sequence[RankResult], partial: Path) -> None:
    """Raise SaveError if any rank has failed."""
    if fault_text := join_faults(results):
        remaining = _newest_remaining(partial.parent)
        raise SaveError(f"could not save {partial}: {fault_text}; {remaining}")


def _newest_remaining(checkpoints: Path) -> str:
    try:
        names = [entry.name for entry in folder.scan(checkpoints) if not entry.bad]
    except FileError:  # this rank cannot list the folder
        return f"those in {checkpoints} were not touched"
    newest = next((name for name in names if _is_folder(checkpoints / name)), None)
    return f"still good: {checkpoints / newest}" if newest else "there was none before it"
