"""Free bytes of /dev/shm, and a warning before MPI_Init if they are few.

MPIs keep their queues there: tens of MiB per rank, allocated when MPI starts. With too few bytes
MPICH ends a rank by a bus error, and Open MPI sends slowly; neither reports the cause. Docker gives
64 MiB.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from hpctrain.core.launchers import Launched

logger = logging.getLogger("hpctrain")

SHM_FOLDER = Path("/dev/shm")
MIB, GIB = 1 << 20, 1 << 30
MIN_BYTES, AMPLE_BYTES = 128 * MIB, GIB
REMEDY = "containers: --shm-size=8g or --ipc=host; else mount -o remount,size=50% /dev/shm"
#: For the launcher, to forward the warning; and for the rank that warns, to do so before another
#: rank of the node dies and takes all with it.
FORWARD_DELAY_S, WARNING_LEAD_S = 0.2, 2.0


def free_shm_bytes(folder: Path = SHM_FOLDER) -> int:
    """Return the bytes free in `folder`; raise OSError where there is none."""
    file_system = os.statvfs(folder)
    return file_system.f_bavail * file_system.f_frsize


def used_files(folder: Path = SHM_FOLDER) -> set[str]:
    """Return the files below `folder` that processes map or hold open, if we may see that."""
    paths: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            lines = (process / "maps").read_text().splitlines()
            paths |= {line.split(maxsplit=5)[-1] for line in lines}
            for descriptor in os.listdir(process / "fd"):
                with suppress(OSError):  # the file was closed meanwhile
                    paths.add(os.readlink(process / "fd" / descriptor))
    return {path for path in paths if path.startswith(f"{folder}/")}


def shortage_warning(folder: Path = SHM_FOLDER) -> str:
    """Return the warning for the time before MPI_Init, "" if there is enough room."""
    try:
        free_bytes = free_shm_bytes(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}: MPI may fail to start; {REMEDY}"
    if free_bytes >= MIN_BYTES:
        return ""
    text = format_free_bytes(free_bytes, folder)
    return f"{text}: MPI may end with a bus error when it starts, or send slowly; {REMEDY}"


def format_free_bytes(free_bytes: int, folder: Path = SHM_FOLDER) -> str:
    """Return the bytes `free_bytes` in `folder` as text."""
    size = f"{free_bytes / MIB:,.0f} MiB" if free_bytes >= MIB else f"{free_bytes >> 10} KiB"
    return f"{size} free in {folder}"


def warn_if_full(launched: Launched) -> None:
    """Warn, once on each node, that its ranks may be lost as soon as MPI starts."""
    message = shortage_warning() if launched.size > 1 else ""
    if not message:
        return
    logs_warning = launched.local_rank in (0, None)
    if logs_warning:
        logger.warning("%s: %s", socket.gethostname(), message)
    time.sleep(FORWARD_DELAY_S if logs_warning else WARNING_LEAD_S)
