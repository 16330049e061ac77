"""The output folder, checked from every node: free space, fsync latency, and whether it is shared.

    rank 0           makes a folder, in it a file with a word    every node reads it: one folder?
    each node        writes 64 KiB, fsync, some times            the median shows a slow client

All files are removed again; the records of the watch (hpctrain/watch) lie there meanwhile. A
folder that does not exist yet is represented by its nearest ancestor that does.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hpctrain.doctor.check import Check, Verdict, node_list
from hpctrain.doctor.job.outliers import median_mad
from hpctrain.transport.shared_memory.dev_shm import GIB, MIB

NAME, WORD = ".hpctrain-doctor-", "word"
BLOCK, TIMES = 1 << 16, 5
MIN_FREE, ENOUGH_FREE = 128 * MIB, GIB
#: Seconds of a write and fsync, whatever the other nodes need. A checkpoint waits for some six, one
#: after another (parts, manifest, folders): below the first for 0.3 s, which no run notices; above
#: the second longer than most of them write.
FAST_S, SLOW_S = 0.05, 1.0


@dataclass(frozen=True)
class FolderState:
    """The folder as one node sees it: bytes free, seconds per write and fsync, or the error."""

    free: int = 0
    fsync_s: float | None = None
    fault: str = ""
    shared: bool = True  #: whether it holds the file that rank 0 wrote


def nearest_existing(folder: Path) -> Path:
    """Return `folder` or its nearest ancestor that exists, which may be no folder."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


def make_probe(place: Path) -> tuple[str, str]:
    """Make a folder with a word in it; return its path and the word, both empty on failure."""
    path, word = place / f"{NAME}{secrets.token_hex(4)}", secrets.token_hex(8)
    try:
        path.mkdir()
        (path / WORD).write_text(word)
    except OSError:
        remove(str(path))
        return "", ""
    return str(path), word


def remove(probe: str) -> None:
    """Remove the folder that `make_probe` made, if any."""
    if probe:
        shutil.rmtree(probe, ignore_errors=True)


def inspect(folder: Path, probe: str, word: str) -> FolderState:
    """Return the state of `folder` on this node; rank 0 wrote `word` into its folder `probe`."""
    shared = not probe or _reads(Path(probe, WORD), word)
    file = folder / f"{NAME}{secrets.token_hex(4)}"
    try:
        return FolderState(shutil.disk_usage(folder).free, _fsync_s(file), "", shared)
    except OSError as error:
        return FolderState(_free_bytes(folder), None, error.strerror or str(error), shared)
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def checks(folder: Path, states: Mapping[str, FolderState]) -> list[Check]:
    """Return the checks of `folder` from its states on all nodes."""
    rows = [_free_space(folder, states)]
    rows += filter(None, [_not_writable(folder, states), _not_shared(folder, states)])
    times = {node: state.fsync_s for node, state in states.items() if state.fsync_s is not None}
    return rows + ([_latency(times)] if times else [])


def _fsync_s(file: Path) -> float:
    """Return the median seconds of a write and an fsync."""
    seconds, block = [], os.urandom(BLOCK)
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for _ in range(TIMES):
            start = time.perf_counter()
            if os.write(handle, block) < BLOCK:
                os.write(handle, block)  # raises the reason of the short write
            os.fsync(handle)
            seconds.append(time.perf_counter() - start)
    finally:
        os.close(handle)
    return median(seconds)


def _reads(file: Path, word: str) -> bool:
    try:
        return file.read_text() == word
    except OSError:
        return False


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _free_space(folder: Path, states: Mapping[str, FolderState]) -> Check:
    node, fullest = min(states.items(), key=lambda item: item[1].free)
    observed = f"{fullest.free / GIB:,.1f} GiB free in {folder}"
    if fullest.free >= ENOUGH_FREE:
        return Check("disk", "ok", observed)
    differ = len({state.free for state in states.values()}) > 1
    verdict: Verdict = "bad" if fullest.free < MIN_FREE else "slow"
    return Check(
        "disk",
        verdict,
        f"{observed}{f' on {node}' * differ}: checkpoints need room",
        "remove old runs (`du -sh runs/*`; `lfs quota -h .`), or name another with --out",
    )


def _not_writable(folder: Path, states: Mapping[str, FolderState]) -> Check | None:
    """Return the fault of a folder that is not writable."""
    faults_by_node = {node: state.fault for node, state in states.items() if state.fault}
    if not faults_by_node:
        return None
    fault = next(iter(faults_by_node.values()))
    blamed = () if len(faults_by_node) == len(states) else tuple(faults_by_node)
    return Check(
        "output folder",
        "bad",
        f"{node_list(faults_by_node)}: {folder}: {fault}",
        "name a folder that can be written with --out, or make room in it",
        blamed,
    )


def _not_shared(folder: Path, states: Mapping[str, FolderState]) -> Check | None:
    """Return the fault of a folder that is not the same on all nodes."""
    blind_nodes = tuple(node for node, state in states.items() if not state.shared)
    if not blind_nodes:
        return None
    not_seen_text = f"{node_list(blind_nodes)} does not see what rank 0 wrote in {folder}"
    observed = f"{not_seen_text}: it is another folder there"
    return Check(
        "output folder",
        "bad",
        observed,
        "name one on a file system that all nodes share (Lustre, GPFS, NFS) with --out",
    )


def _latency(times: Mapping[str, float]) -> Check:
    stats = median_mad(list(times.values()))
    slow_nodes = {node: s for node, s in times.items() if s > min(max(stats.limit, FAST_S), SLOW_S)}
    observed = f"median {stats.median * 1e3:.1f} ms to write {BLOCK >> 10} KiB and fsync"
    if not slow_nodes:
        return Check("file system", "ok", observed)
    slowest_node = max(slow_nodes, key=lambda node: slow_nodes[node])
    max_ms = slow_nodes[slowest_node] * 1e3
    observed += f" (MAD {stats.mad * 1e3:.1f}); {node_list(slow_nodes)}: up to {max_ms:.0f} ms"
    blamed = () if len(slow_nodes) == len(times) else tuple(slow_nodes)
    return Check(
        "file system",
        "slow",
        observed,
        "save less often ([checkpoint] every_epochs), or name another with --out",
        blamed,
    )
