"""Check the output folder from every node: free space, fsync latency, and whether it is shared.

    rank 0       makes a probe folder with a file that holds a word; every node reads the file
    each node    writes 64 KiB and calls fsync several times; the median shows a slow client

The probe folder also holds the records of the watch (hpctrain/watch) and is removed at the end. If
the output folder does not exist yet, its nearest existing ancestor is checked instead.
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

from hpctrain.tools.doctor.check import Check, Verdict, compute_median_mad, node_list
from hpctrain.transport.shared_memory.dev_shm import GIB, MIB

PROBE_PREFIX, WORD_FILE = ".hpctrain-doctor-", "word"
BLOCK_BYTES, WRITE_COUNT = 1 << 16, 5
MIN_FREE_BYTES, AMPLE_FREE_BYTES = 128 * MIB, GIB
#: Limits in seconds of a write and fsync: below FAST_FSYNC_S a node is never reported, above
#: SLOW_FSYNC_S always. A checkpoint waits for about six writes in sequence (parts, manifest,
#: folders): 0.3 s with the first limit, which no run notices.
FAST_FSYNC_S, SLOW_FSYNC_S = 0.05, 1.0


@dataclass(frozen=True)
class FolderState:
    """The folder on one node: free bytes, and seconds per write and fsync or an error."""

    free: int = 0
    fsync_s: float | None = None
    fault: str = ""
    shared: bool = True  #: whether this node sees the file that rank 0 wrote


def nearest_existing_folder(folder: Path) -> Path:
    """Return `folder` or its nearest existing ancestor, which may be a file."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


def make_probe(folder: Path) -> tuple[str, str]:
    """Make a folder with a file that holds a word; return path and word, "" and "" on failure."""
    path, word = folder / f"{PROBE_PREFIX}{secrets.token_hex(4)}", secrets.token_hex(8)
    try:
        path.mkdir()
        (path / WORD_FILE).write_text(word)
    except OSError:
        remove_probe(str(path))
        return "", ""
    return str(path), word


def remove_probe(probe: str) -> None:
    """Remove the folder that `make_probe` made, if any."""
    if probe:
        shutil.rmtree(probe, ignore_errors=True)


def inspect_folder(folder: Path, probe: str, word: str) -> FolderState:
    """Return the state of `folder` on this node; rank 0 wrote `word` into its folder `probe`."""
    shared = not probe or _file_contains(Path(probe, WORD_FILE), word)
    file = folder / f"{PROBE_PREFIX}{secrets.token_hex(4)}"
    free = 0
    try:
        free = shutil.disk_usage(folder).free
        return FolderState(free, _measure_fsync_s(file), "", shared)
    except OSError as error:
        return FolderState(free, None, error.strerror or str(error), shared)
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def check_folder(folder: Path, states: Mapping[str, FolderState]) -> list[Check]:
    """Return the checks of `folder` from its states on all nodes."""
    checks = [_check_free_space(folder, states)]
    checks += filter(None, [_check_writable(folder, states), _check_shared(folder, states)])
    fsync_times = {
        node: state.fsync_s for node, state in states.items() if state.fsync_s is not None
    }
    return checks + ([_check_latency(fsync_times)] if fsync_times else [])


def _measure_fsync_s(file: Path) -> float:
    """Return the median time of a write with fsync."""
    seconds, block = [], os.urandom(BLOCK_BYTES)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for _ in range(WRITE_COUNT):
            start = time.perf_counter()
            if os.write(descriptor, block) < BLOCK_BYTES:
                os.write(descriptor, block)  # raises the reason of the short write
            os.fsync(descriptor)
            seconds.append(time.perf_counter() - start)
    finally:
        os.close(descriptor)
    return median(seconds)


def _file_contains(file: Path, word: str) -> bool:
    try:
        return file.read_text() == word
    except OSError:
        return False


def _check_free_space(folder: Path, states: Mapping[str, FolderState]) -> Check:
    node, fullest_state = min(states.items(), key=lambda item: item[1].free)
    observed = f"{fullest_state.free / GIB:,.1f} GiB free in {folder}"
    if fullest_state.free >= AMPLE_FREE_BYTES:
        return Check("disk", "ok", observed)
    free_space_differs = len({state.free for state in states.values()}) > 1
    verdict: Verdict = "bad" if fullest_state.free < MIN_FREE_BYTES else "slow"
    return Check(
        "disk",
        verdict,
        f"{observed}{f' on {node}' * free_space_differs}: checkpoints need space",
        "remove old runs (`du -sh runs/*`; `lfs quota -h .`), or name another with --out",
    )


def _check_writable(folder: Path, states: Mapping[str, FolderState]) -> Check | None:
    """Return the fault of a folder that some nodes cannot write; None if all can."""
    faults_by_node = {node: state.fault for node, state in states.items() if state.fault}
    if not faults_by_node:
        return None
    fault = next(iter(faults_by_node.values()))
    blamed_nodes = () if len(faults_by_node) == len(states) else tuple(faults_by_node)
    return Check(
        "output folder",
        "bad",
        f"{node_list(faults_by_node)}: {folder}: {fault}",
        "name a writable folder with --out, or free space in it",
        blamed_nodes,
    )


def _check_shared(folder: Path, states: Mapping[str, FolderState]) -> Check | None:
    """Return the fault of a folder that is not the same on all nodes; None if it is."""
    blind_nodes = tuple(node for node, state in states.items() if not state.shared)
    if not blind_nodes:
        return None
    missing = f"{node_list(blind_nodes)} does not see the file that rank 0 wrote in {folder}"
    observed = f"{missing}: the folder is not shared"
    return Check(
        "output folder",
        "bad",
        observed,
        "name a folder that all nodes share (Lustre, GPFS, NFS) with --out",
    )


def _check_latency(fsync_times: Mapping[str, float]) -> Check:
    stats = compute_median_mad(list(fsync_times.values()))
    slow_nodes = {
        node: seconds
        for node, seconds in fsync_times.items()
        if seconds > min(max(stats.limit, FAST_FSYNC_S), SLOW_FSYNC_S)
    }
    observed = f"median {stats.median * 1e3:.1f} ms to write {BLOCK_BYTES >> 10} KiB and fsync"
    if not slow_nodes:
        return Check("file system", "ok", observed)
    slowest_ms = max(slow_nodes.values()) * 1e3
    observed += f" (MAD {stats.mad * 1e3:.1f}); {node_list(slow_nodes)}: up to {slowest_ms:.0f} ms"
    blamed_nodes = () if len(slow_nodes) == len(fsync_times) else tuple(slow_nodes)
    return Check(
        "file system",
        "slow",
        observed,
        "save less often ([checkpoint] every_epochs), or name another with --out",
        blamed_nodes,
    )
