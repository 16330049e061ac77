"""Shared-memory segments of MPI in /dev/shm, announced to `hpctrain launch` when MPI starts.

MPI removes its segments when it is finalized; after a SIGKILL of all its processes they would stay
and occupy memory. `hpctrain launch`, or its guard process (cluster/guard.py), removes the announced
segments once no process of the job is left.
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
    """Append this process's segments to launch's list, if launch started this process."""
    file = os.environ.get(launchers.SEGMENTS, "")
    with suppress(OSError):  # launch may run on another host or may have been killed
        if os.readlink(file).startswith(f"/memfd:{launchers.SEGMENTS}"):
            with open(file, "a") as segment_list:
                segment_list.write(
                    "".join(f"{inode} {path}\n" for inode, path in mapped_segments())
                )


def mapped_segments() -> Iterator[tuple[int, str]]:
    """Yield (inode, path) of the files in /dev/shm that this process has mapped."""
    lines = (line.split(maxsplit=5) for line in MAPS_FILE.read_text().splitlines())
    yield from {
        (int(inode), path)
        for *_, inode, path in (line for line in lines if len(line) == 6)
        if path.startswith(SHM_FOLDER) and not path.endswith(" (deleted)")
    }
