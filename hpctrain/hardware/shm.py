"""Room in /dev/shm, where MPIs keep their queues: tens of MiB per rank, claimed when they start.

Too little of it ends a rank by a bus error (MPICH), or makes messages slow (Open MPI); neither says
why. Docker gives 64 MiB.
"""

from __future__ import annotations

import shutil
from pathlib import Path

SHM = Path("/dev/shm")
MIB, GIB = 1 << 20, 1 << 30
LEAST, ENOUGH = 128 * MIB, GIB
GROW = "containers: --shm-size=8g or --ipc=host; else mount -o remount,size=50% /dev/shm"


def free(folder: Path = SHM) -> int:
    """Return the bytes free in `folder`; raise OSError where there is none."""
    return shutil.disk_usage(folder).free


def too_little(folder: Path = SHM) -> str:
    """Return what is to be said before MPI starts, "" where there is room enough."""
    try:
        left = free(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}: MPI may fail to start; {GROW}"
    if left >= LEAST:
        return ""
    return (
        f"{told(left, folder)}: MPI may end with a bus error when it starts, or send slowly; {GROW}"
    )


def told(left: int, folder: Path = SHM) -> str:
    """Return how many bytes are `left` in `folder`, in words."""
    size = f"{left / MIB:,.0f} MiB" if left >= MIB else f"{left >> 10} KiB"
    return f"{size} free in {folder}"
