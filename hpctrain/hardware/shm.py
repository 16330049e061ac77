"""Room in /dev/shm, where MPIs keep their queues: tens of MiB per rank, claimed when they start.

Too little of it ends a rank by a bus error (MPICH), or makes messages slow (Open MPI); neither says
why. Docker gives 64 MiB.
"""

from __future__ import annotations

import shutil
from pathlib import Path

SHM = Path("/dev/shm")
MIB, GIB = 1 << 20, 1 << 30
MIN_BYTES, AMPLE_BYTES = 128 * MIB, GIB
GROW = "containers: --shm-size=8g or --ipc=host; else mount -o remount,size=50% /dev/shm"


def free(folder: Path = SHM) -> int:
    """Return the bytes free in `folder`; raise OSError where there is none."""
    return shutil.disk_usage(folder).free


def too_little(folder: Path = SHM) -> str:
    """Return the warning for the time before MPI_Init, "" if there is enough room."""
    try:
        free_bytes = free(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}: MPI may fail to start; {GROW}"
    if free_bytes >= MIN_BYTES:
        return ""
    text = free_text(free_bytes, folder)
    return f"{text}: MPI may end with a bus error when it starts, or send slowly; {GROW}"


def free_text(free_bytes: int, folder: Path = SHM) -> str:
    """Return the bytes `free_bytes` in `folder` as text."""
    size = f"{free_bytes / MIB:,.0f} MiB" if free_bytes >= MIB else f"{free_bytes >> 10} KiB"
    return f"{size} free in {folder}"
