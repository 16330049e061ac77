"""Shared-memory segments of MPI in /dev/shm, announced to `hpctrain launch` as MPI starts.

A library removes its segments when it ends; where all its processes are killed they would stay,
and with them the memory. launch, or its guard, removes the segments that its ranks announced here,
once no process of the job is left: cluster/guard.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hpctrain.core import launchers

FOLDER = "/dev/shm/"
MAPS = Path("/proc/self/maps")


def announce() -> None:
    """Append this process's segments to the list in launch's memory, if launch started us."""
    file = os.environ.get(launchers.SEGMENTS, "")
    with suppress(OSError):  # launch may run on another host, or have been killed
        if os.readlink(file).startswith(f"/memfd:{launchers.SEGMENTS}"):
            with open(file, "a") as note:
                note.write("".join(f"{inode} {path}\n" for inode, path in mapped_segments()))


def mapped_segments() -> Iterator[tuple[int, str]]:
    """Yield (inode, path) of the files in /dev/shm that this process has mapped."""
    lines = (line.split(maxsplit=5) for line in MAPS.read_text().splitlines())
    yield from {
        (int(inode), path)
        for *_, inode, path in (line for line in lines if len(line) == 6)
        if path.startswith(FOLDER) and not path.endswith(" (deleted)")
    }
