"""The lock of a run's folder: one job writes to it, and the kernel releases it at any exit."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path

from hpctrain.core import atomic
from hpctrain.core.errors import UsageError
from hpctrain.core.files import brief
from hpctrain.core.opening import open_file

log = logging.getLogger(__name__)

LOCK = ".lock"
POLL_S = 0.01


class LockedError(UsageError):
    """A folder is locked: another process writes to it."""


def lock_folder(run: Path, wait_s: float = 0.0) -> int:
    """Lock a folder, return the file descriptor; raise LockedError if it is locked for `wait_s`."""
    lock = open_file(run / LOCK, os.O_RDWR | os.O_CREAT)
    deadline_s = time.monotonic() + wait_s
    try:
        while time.monotonic() < deadline_s and not _take_lock(lock):
            time.sleep(POLL_S)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 200).decode(errors="replace")
        os.close(lock)
        raise LockedError(f"{run} is being written by {brief(holder)[1:-1]}") from None
    except OSError as error:  # some parallel file systems have no locks
        log.warning("%s cannot be locked (%s): let no other job write there", run, error.strerror)
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {os.uname().nodename}".encode())
    atomic.sweep(run)
    atomic.sweep(run / "replay", levels=1)
    return lock


def _take_lock(lock: int) -> bool:
    """Return whether the lock could be taken."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(run: Path) -> bool:
    """Return whether a process writes to the folder; False where the file system has no locks."""
    try:
        handle = open_file(run / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    finally:
        os.close(handle)
    return False
