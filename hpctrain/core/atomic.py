"""Files written whole or not at all: to a temporary file, synced, then renamed into place.

    .summary.json.4711-98765.4712@node7

while thread 4712 of process 4711 on node7, started at clock tick 98765, writes summary.json.

A killed writer leaves its temporary file; `sweep` removes those of writers that have ended. The
start tells processes of one number apart: in containers numbers are reused at once.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from pathlib import Path

log = logging.getLogger(__name__)
TEMPORARY_NAME = re.compile(
    r"\..+\.(json|jsonl|toml|redone)\.(?P<process>[0-9-]{1,40})\.[0-9]+(@(?P<host>.+))?"
)
#: After this time a temporary file has no writer, even if of another host.
MAX_WRITE_S = 3600.0


def replace(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all; raise OSError."""
    aside = write_aside(path, content)
    try:
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def write_aside(path: Path, content: str | bytes) -> Path:
    """Write `content` to a temporary file beside `path`, and return that; raise OSError."""
    writer = f"{process_identity(os.getpid())}.{threading.get_native_id()}@{os.uname().nodename}"
    aside = path.with_name(f".{path.name}.{writer}")
    try:
        aside.unlink(missing_ok=True)
        with open(aside, "xb") as file:  # never a link
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
    """Return whether `path` is a temporary file of a writer that has ended."""
    named = TEMPORARY_NAME.fullmatch(path.name)
    if named is None:
        return False
    pid = named["process"].partition("-")[0]
    if named["host"] == os.uname().nodename and process_identity(pid) != named["process"]:
        return True
    try:
        return time.time() - path.lstat().st_mtime > MAX_WRITE_S
    except FileNotFoundError:
        return False


def process_identity(pid: int | str) -> str:
    """Return the number and the start of a process, in clock ticks; '' if it has ended.

    A zombie has ended: in a container whose first process does not reap, it stays for ever.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else f"{pid}-{fields[18]}"
