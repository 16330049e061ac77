"""The lock of a run's folder: one job writes to it, and the kernel releases it at any exit."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from pathlib import Path

from hpctrain.core import atomic
from hpctrain.core.errors import UsageError
from hpctrain.core.files import brief

log = logging.getLogger(__name__)

LOCK = ".lock"
POLL_S = 0.01


class LockedError(UsageError):
    """A folder is locked: another process writes to it."""


def lock_folder(run: Path, wait_s: float = 0.0) -> int:
    """Lock a folder, return the file descriptor; raise LockedError if it is locked for `wait_s`."""
    lock, deadline_s = _open_lock(run / LOCK), time.monotonic() + wait_s
    try:
        while time.monotonic() < deadline_s and not _take(lock):
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
    for folder in (run, run / "replay"):
        atomic.sweep(folder)
    return lock


def _take(lock: int) -> bool:
    """Return whether the lock could be taken."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_lock(path: Path) -> int:
    """Open a lock's file for writing; refuse a link to another file, symbolic or hard."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(handle)
        raise UsageError(f"{path}: expected a file of its own, seen a link or no file; remove it")
    return handle


def is_locked(run: Path) -> bool:
    """Return whether a process writes to the folder; False where the file system has no locks."""
    try:
        handle = os.open(run / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
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
