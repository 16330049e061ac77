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
    partial_folder = checkpoints / f".{step_name(step)}.partial"
    on_all_ranks = functools.partial(_on_all_ranks, link, partial_folder)
    try:
        # Rank 0 alone gives the edges at which all ranks cut arrays.
        slot_edges_json, results = broadcast_from_first(
            link, lambda: _create_partial_folder(partial_folder, about)
        )
        _raise_faults(results, partial_folder)
        slot_edges: SlotEdges = json.loads(slot_edges_json)
        part_path = partial_folder / f"part-{link.rank:05d}.safetensors"
        tables = on_all_ranks(lambda: parts.write_part(part_path, pieces, slot_edges, state or {}))
        contributions = [Contribution(*table) for table in tables]
        # Another process, on many clusters another node, reads each part before it counts.
        peer_contribution = contributions[(link.rank + 1) % link.size]
        on_all_ranks(
            lambda: parts.check_part(
                partial_folder,
                part_from_table(peer_contribution.part),
                merge_arrays([peer_contribution]),
                slot_edges,
            )
        )
        commit = functools.partial(_commit, partial_folder, step, contributions, about)
        checkpoint_name = on_all_ranks(lambda: commit() if link.rank == 0 else None)[0]
    except SaveError:
        if link.rank == 0:
            shutil.rmtree(partial_folder, ignore_errors=True)
        raise
    if link.rank == 0 and keep is not None:
        _remove_old_checkpoints(checkpoints, checkpoint_name, keep, keep_best)
    return checkpoints / checkpoint_name


def sweep(run: Path) -> None:
    """Remove the partial checkpoints in `run`, which the caller has locked; warn if any stay."""
    try:
        _remove_partial_folders(folder.of(run))
    except OSError as error:
        logger.warning("partial checkpoints stay: %s", error)


def _create_partial_folder(partial_folder: Path, about: Mapping[str, Any]) -> bytes:
    """Create the folder of a checkpoint; return the edges of its slots as JSON."""
    checkpoints = partial_folder.parent
    checkpoints.parent.mkdir(parents=True, exist_ok=True)
    opening.make_folder(checkpoints)
    parts.sync(checkpoints.parent)
    _remove_partial_folders(checkpoints)
    partial_folder.mkdir()
    return json.dumps(
        {name: distinct_bounds(spans) for name, spans in slot_spans(about).items()}
    ).encode()


def _remove_partial_folders(checkpoints: Path) -> None:
    with suppress(FileNotFoundError):
        for name in fnmatch.filter(opening.names_in(checkpoints), ".step-*.partial"):
            if _is_folder(leftover := checkpoints / name):  # which nobody reads
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink()


def _commit(
    partial_folder: Path, step: int, contributions: Sequence[Contribution], about: dict[str, Any]
) -> str:
    data = manifest.to_bytes(manifest.assemble(step, contributions, about))
    with parts.create_file(partial_folder / manifest.MANIFEST) as write:
        write(data)
    parts.sync(partial_folder)
    manifest.read(partial_folder)
    path = folder.vacant_path(partial_folder.parent, step, bad=False)
    os.rename(partial_folder, path)  # from here on it counts
    parts.sync(partial_folder.parent)
    return path.name


def _remove_old_checkpoints(
    checkpoints: Path, newest: str, keep: int, keep_best: Criterion | None
) -> None:
    try:
        intact_names = [entry.name for entry in folder.scan(checkpoints) if not entry.bad]
        names = [name for name in intact_names if _is_folder(checkpoints / name)]
        run = checkpoints.parent
        ranked = folder.rank_by(folder.listing(run), keep_best) if keep_best else []
        best_names = [entry.path.name for entry in ranked[:1]]
        for name in (
            name for name in names[names.index(newest) + keep :] if name not in best_names
        ):
            # Renamed in one step, so that a half removed one never passes for a damaged one.
            doomed_path = checkpoints / f".{name}.partial"
            os.rename(checkpoints / name, doomed_path)
            shutil.rmtree(doomed_path)
    except (OSError, FileError) as error:
        logger.warning("old checkpoints stay: %s", error)


def _is_folder(path: Path) -> bool:
    """Return whether `path` is a folder, as `save` creates: no link and no file."""
    return path.is_dir() and not path.is_symlink()


def _on_all_ranks(link: Link, partial_folder: Path, call: Callable[[], Any]) -> list[Any]:
    results = gather_results(link, call)
    _raise_faults(results, partial_folder)
    return [result.value for result in results]


def _raise_faults(results: Sequence[RankResult], partial_folder: Path) -> None:
    """Raise SaveError if any rank has failed."""
    if fault_text := join_faults(results):
        remaining_text = _newest_remaining(partial_folder.parent)
        raise SaveError(f"could not save {partial_folder}: {fault_text}; {remaining_text}")


def _newest_remaining(checkpoints: Path) -> str:
    try:
        names = [entry.name for entry in folder.scan(checkpoints) if not entry.bad]
    except FileError:  # this rank cannot list the folder
        return f"those in {checkpoints} were not touched"
    newest = next((name for name in names if _is_folder(checkpoints / name)), None)
    return f"still good: {checkpoints / newest}" if newest else "there was none before it"
