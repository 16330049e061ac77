"""Files written whole or not at all: aside, through to the disk, then renamed into place.

    .summary.json.4711.4712@node7    while thread 4712 of process 4711 on node7 writes summary.json

A writer that is killed leaves its file aside; `sweep` removes those of writers that are no more.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from pathlib import Path

log = logging.getLogger(__name__)
ASIDE = re.compile(r"\..+\.(json|jsonl|toml|redone)\.(?P<pid>[0-9]{1,10})\.[0-9]+(@(?P<host>.+))?")
#: After so long a file aside has no writer, though it may be of another host or a number used anew.
LONGEST_WRITE_S = 3600.0


def replace(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all; raise OSError."""
    aside = write_aside(path, content)
    try:
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def write_aside(path: Path, content: str | bytes) -> Path:
    """Write `content` to a file of this thread beside `path`, and return that; raise OSError."""
    writer = f"{os.getpid()}.{threading.get_native_id()}@{os.uname().nodename}"
    aside = path.with_name(f".{path.name}.{writer}")
    try:
        with open(aside, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    return aside


def sweep(folder: Path) -> None:
    """Remove the files that killed writers left in `folder`."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if is_left(path):
            path.unlink(missing_ok=True)
            log.info("removed %s, which a killed process left", path)


def is_left(path: Path) -> bool:
    """Return whether `path` was left aside by a writer that is no more."""
    named = ASIDE.fullmatch(path.name)
    if named is None:
        return False
    if named["host"] == os.uname().nodename and not _alive(int(named["pid"])):
        return True
    try:
        return time.time() - path.lstat().st_mtime > LONGEST_WRITE_S
    except FileNotFoundError:
        return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
