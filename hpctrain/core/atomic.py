"""Files written whole or not at all: to a temporary file, synced, then renamed into place.

    .summary.json.4711-98765.4712@node7

while thread 4712 of process 4711 on node7, started at clock tick 98765, writes summary.json.

A killed writer leaves its temporary file; `sweep` removes the files whose writers have ended. The
start tells processes of one number apart: in containers numbers are reused at once.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from contextlib import suppress
from pathlib import Path

from hpctrain.core import opening

log = logging.getLogger(__name__)
TEMPORARY_NAME = re.compile(
    r"\..+\.(json|jsonl|toml|redone)\.(?P<process>[0-9-]{1,40})\.[0-9]+(@(?P<host>.+))?"
)
#: After this time a temporary file has no writer, not even on another host.
MAX_WRITE_S = 3600.0


def replace(path: Path, content: str | bytes, levels: int = 1) -> None:
    """Write a file whole or not at all; raise OSError. For `levels` see opening.py."""
    temporary_path = write_aside(path, content, levels)
    try:
        opening.rename(temporary_path, path.name, levels)
    except OSError:
        opening.remove(temporary_path, levels)
        raise


def write_aside(path: Path, content: str | bytes, levels: int = 1) -> Path:
    """Write `content` to a temporary file beside `path`, and return that; raise OSError."""
    writer = f"{process_identity(os.getpid())}.{threading.get_native_id()}@{os.uname().nodename}"
    temporary_path = path.with_name(f".{path.name}.{writer}")
    try:
        opening.remove(temporary_path, levels)
        with opening.create(temporary_path, levels, exclusive=True) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        opening.remove(temporary_path, levels)
        raise
    return temporary_path


def sweep(folder: Path, levels: int = 0) -> None:
    """Remove the files that killed writers left in `folder`, if that is one."""
    names = []
    with suppress(OSError):
        names = opening.names_in(folder, levels)
    for path in (folder / name for name in names):
        if is_left(path):
            opening.remove(path, levels + 1)
            log.info("removed %s, which a killed process left", path)


def is_left(path: Path) -> bool:
    """Return whether `path` is a temporary file of a writer that has ended."""
    name_match = TEMPORARY_NAME.fullmatch(path.name)
    if name_match is None:
        return False
    pid = name_match["process"].partition("-")[0]
    if name_match["host"] == os.uname().nodename and process_identity(pid) != name_match["process"]:
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
