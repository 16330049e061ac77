"""The output folder, seen from every node: room, the time to write and fsync, whether it is one.

    rank 0           makes a folder, in it a file with a word    every node reads it: one folder?
    each node        writes 64 KiB, fsync, some times            the median tells a slow client

All that is written is removed again; what ranks do meanwhile, see
hpctrain/watch, lies there, too. A folder that is not there yet is judged by the one above.
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

from hpctrain.doctor.check import Check, Verdict
from hpctrain.doctor.job.hosts import listed
from hpctrain.doctor.job.outliers import usual
from hpctrain.doctor.node import GIB, MIB

NAME, WORD = ".hpctrain-doctor-", "word"
BLOCK, TIMES = 1 << 16, 5
LEAST_FREE, ENOUGH_FREE = 128 * MIB, GIB
#: Seconds of a write and fsync, whatever the other nodes need. A checkpoint waits for some six, one
#: after another (parts, manifest, folders): below the first for 0.3 s, which no run notices; above
#: the second longer than most of them write.
FAST_S, SLOW_S = 0.05, 1.0


@dataclass(frozen=True)
class Seen:
    """What one node found: bytes free, seconds per write and fsync, or why that failed."""

    free: int = 0
    fsync_s: float | None = None
    fault: str = ""
    shared: bool = True  #: whether it has what rank 0 wrote


def there(folder: Path) -> Path:
    """Return `folder`, or the nearest above that exists, also where it is no folder."""
    folder = folder.absolute()
    return next(one for one in (folder, *folder.parents) if os.path.lexists(one))


def mark(place: Path) -> tuple[str, str]:
    """Make a folder with a word in it; return its path and the word, empty where that fails."""
    made, word = place / f"{NAME}{secrets.token_hex(4)}", secrets.token_hex(8)
    try:
        made.mkdir()
        (made / WORD).write_text(word)
    except OSError:
        remove(str(made))
        return "", ""
    return str(made), word


def remove(marked: str) -> None:
    """Remove the folder that `mark` has made, if it has."""
    if marked:
        shutil.rmtree(marked, ignore_errors=True)


def look(folder: Path, marked: str, word: str) -> Seen:
    """Return what this node finds in `folder`, where rank 0 put `word` into the folder `marked`."""
    shared = not marked or _reads(Path(marked, WORD), word)
    file = folder / f"{NAME}{secrets.token_hex(4)}"
    try:
        return Seen(shutil.disk_usage(folder).free, _fsync_s(file), "", shared)
    except OSError as error:
        return Seen(_free(folder), None, error.strerror or str(error), shared)
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def checks(folder: Path, found: Mapping[str, Seen]) -> list[Check]:
    """Return what is to be said of `folder` as the nodes `found` it."""
    rows = [_room(folder, found)]
    rows += filter(None, [_refused(folder, found), _not_one(folder, found)])
    times = {node: one.fsync_s for node, one in found.items() if one.fsync_s is not None}
    return rows + ([_latency(times)] if times else [])


def _fsync_s(file: Path) -> float:
    """Return the median seconds of a write and an fsync."""
    taken, block = [], os.urandom(BLOCK)
    opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for _ in range(TIMES):
            start = time.perf_counter()
            if os.write(opened, block) < BLOCK:
                os.write(opened, block)  # says why it was short
            os.fsync(opened)
            taken.append(time.perf_counter() - start)
    finally:
        os.close(opened)
    return median(taken)


def _reads(file: Path, word: str) -> bool:
    try:
        return file.read_text() == word
    except OSError:
        return False


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _room(folder: Path, found: Mapping[str, Seen]) -> Check:
    node, least = min(found.items(), key=lambda one: one[1].free)
    seen = f"{least.free / GIB:,.1f} GiB free in {folder}"
    if least.free >= ENOUGH_FREE:
        return Check("disk", "ok", seen)
    others = len({one.free for one in found.values()}) > 1
    verdict: Verdict = "bad" if least.free < LEAST_FREE else "slow"
    return Check(
        "disk",
        verdict,
        f"{seen}{f' on {node}' * others}: checkpoints need room",
        "remove old runs (`du -sh runs/*`; `lfs quota -h .`), or name another with --out",
    )


def _refused(folder: Path, found: Mapping[str, Seen]) -> Check | None:
    """Return the fault of a folder in which nothing can be written."""
    wrong = {node: one.fault for node, one in found.items() if one.fault}
    if not wrong:
        return None
    fault = next(iter(wrong.values()))
    blamed = () if len(wrong) == len(found) else tuple(wrong)
    return Check(
        "output folder",
        "bad",
        f"{listed(wrong)}: {folder}: {fault}",
        "name a folder that can be written with --out, or make room in it",
        blamed,
    )


def _not_one(folder: Path, found: Mapping[str, Seen]) -> Check | None:
    """Return the fault of a folder that is another one on some nodes."""
    apart = tuple(node for node, one in found.items() if not one.shared)
    if not apart:
        return None
    seen = f"{listed(apart)} does not see what rank 0 wrote in {folder}: it is another folder there"
    return Check(
        "output folder",
        "bad",
        seen,
        "name one on a file system that all nodes share (Lustre, GPFS, NFS) with --out",
    )


def _latency(times: Mapping[str, float]) -> Check:
    found = usual(list(times.values()))
    slow = {node: s for node, s in times.items() if s > min(max(found.limit, FAST_S), SLOW_S)}
    seen = f"median {found.median * 1e3:.1f} ms to write {BLOCK >> 10} KiB and fsync"
    if not slow:
        return Check("file system", "ok", seen)
    worst = max(slow, key=lambda node: slow[node])
    seen += f" (MAD {found.mad * 1e3:.1f}); {listed(slow)}: up to {slow[worst] * 1e3:.0f} ms"
    blamed = () if len(slow) == len(times) else tuple(slow)
    return Check(
        "file system",
        "slow",
        seen,
        "save less often ([checkpoint] every_epochs), or name another with --out",
        blamed,
    )
