"""Files in the node's memory, announced to `hpctrain launch`, which removes them in the end.

MPI removes its segments when it is finalized; after a SIGKILL of every process they would stay and
occupy memory. `hpctrain launch`, or its guard process (cluster/guard.py), removes the announced
files once no process of the job is left. Records of the watch it first copies to the run's folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hpctrain.core import launchers

SHM_FOLDER = "/dev/shm/"
MAPS_FILE = Path("/proc/self/maps")


def announce_segments() -> None:
    """Announce this process's segments."""
    _append("".join(f"{inode} {path}\n" for inode, path in mapped_segments()))


def announce_record(path: str, copy: Path) -> None:
    """Announce a file of records, which is moved to `copy` if its job dies."""
    if "\n" not in f"{path}{copy}":
        _append(f"{os.stat(path).st_ino} {path}\t{copy.absolute()}\n")


def _append(lines: str) -> None:
    """Append to launch's list, if launch started this process."""
    file = os.environ.get(launchers.SEGMENTS, "")
    with suppress(OSError):  # launch may run on another host or may have been killed
        if os.readlink(file).startswith(f"/memfd:{launchers.SEGMENTS}"):
            with open(file, "a") as segment_list:
                segment_list.write(lines)


def mapped_segments() -> Iterator[tuple[int, str]]:
    """Yield (inode, path) of the files in /dev/shm that this process has mapped."""
    lines = (line.split(maxsplit=5) for line in MAPS_FILE.read_text().splitlines())
    yield from {
        (int(inode), path)
        for *_, inode, path in (line for line in lines if len(line) == 6)
        if path.startswith(SHM_FOLDER) and not path.endswith(" (deleted)")
    }
