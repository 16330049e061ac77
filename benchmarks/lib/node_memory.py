"""Memory that the ranks of a node use, but for mapped files, and what their files need of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.world import World

LOOK_S = 0.05  #: between two looks at the memory


def drop_cache(folder: Path) -> None:
    """Let the system forget the files of a folder, so that they are read from the disk."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def used_bytes() -> int:
    """Return this rank's part of the memory that is no file's."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    fields = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
    return (int(fields["Pss_Anon"]) + int(fields["Pss_Shmem"])) << 10


@contextmanager
def peak_bytes(world: World, peak: list[int]) -> Iterator[None]:
    """Append the sum over the ranks of the most that each one's memory grows by; collective."""
    before, ended, most = used_bytes(), threading.Event(), [0]

    def look() -> None:
        while not ended.wait(LOOK_S):
            most[0] = max(most[0], used_bytes() - before)

    thread = threading.Thread(target=look)
    thread.start()
    yield
    ended.set()
    thread.join()
    peak.append(sum(map(int, world.gather(str(most[0])))))
