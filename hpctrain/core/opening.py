"""The opening of files that others may have made: by folders' descriptors, and without links.

    RUN / watch / nodes.json      levels = 2: neither `watch` nor `nodes.json` may be a link
    FILE                          levels = NAMED: a path that a user names, which may be one

The parts of a path before its last `levels` are named by a user. A file is opened only if it is
regular, and with `own` this user's: no FIFO waits, no device is touched, no link leads elsewhere.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

NAMED = 0  #: levels of a path that a user names
_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket",
          stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}  # fmt: skip
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PASSED = _FOLDER | getattr(os, "O_PATH", 0)  #: a folder that may not be listed can be passed


def open_file(
    path: str | Path, flags: int, levels: int = 1, *, own: bool = False, mode: int = 0o666
) -> int:
    """Return the descriptor of a regular file; with `own` it must belong to this user.

    Raises OSError with the path and the reason; never waits, as the opening of a FIFO would.
    """
    flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (os.O_NOFOLLOW if levels else 0)
    handle = -1
    try:
        with _in_folder(path, levels) as (folder, name):
            with suppress(FileNotFoundError):  # first: to open some devices has effects
                status = os.stat(name, dir_fd=folder, follow_symlinks=not levels)
                if not flags & os.O_EXCL:
                    _check_file(status, name, folder, flags, own)
            handle = os.open(name, flags, mode, dir_fd=folder)
            _check_file(os.fstat(handle), name, folder, flags, own)
    except BaseException:
        if handle >= 0:
            os.close(handle)
        raise
    return handle


def create(path: str | Path, levels: int = 1, *, exclusive: bool = False) -> BinaryIO:
    """Open a file for writing, emptied, or with `exclusive` a new one; raise OSError."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if exclusive else os.O_TRUNC)
    return os.fdopen(open_file(path, flags, levels), "wb")


def names_in(path: str | Path, levels: int = 1) -> list[str]:
    """Return the names in a folder; raise OSError."""
    with _in_folder(Path(path) / ".names", levels and levels + 1) as (passed, _):
        folder = os.open(".", _FOLDER, dir_fd=passed)
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)


def make_folder(path: str | Path, levels: int = 1) -> None:
    """Make a folder unless there is one; raise OSError."""
    with _in_folder(path, levels) as (folder, name):
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=folder)
        os.close(_open_folder(name, folder))


def remove(path: str | Path, levels: int = 1) -> None:
    """Remove a file or a link if there is one; raise OSError."""
    with suppress(FileNotFoundError), _in_folder(path, levels) as (folder, name):
        os.unlink(name, dir_fd=folder)


def remove_folder(path: str | Path, levels: int = 1) -> None:
    """Remove a folder with all that is in it, if there is one; raise OSError. Follows no link."""
    with suppress(FileNotFoundError), _in_folder(path, levels) as (folder, name):
        os.close(_open_folder(name, folder))
        for _, inner, files, handle in os.fwalk(name, topdown=False, dir_fd=folder):
            for entry in (*inner, *files):
                is_folder = stat.S_ISDIR(os.lstat(entry, dir_fd=handle).st_mode)
                (os.rmdir if is_folder else os.unlink)(entry, dir_fd=handle)
        os.rmdir(name, dir_fd=folder)


def rename(path: str | Path, new_name: str, levels: int = 1) -> None:
    """Rename a file within its folder and replace its namesake; raise OSError."""
    with _in_folder(path, levels) as (folder, name):
        os.replace(name, new_name, src_dir_fd=folder, dst_dir_fd=folder)


@contextmanager
def _in_folder(path: str | Path, levels: int) -> Iterator[tuple[int, str]]:
    """Yield the descriptor of the folder of `path`, and the name in it; OSErrors name `path`."""
    path = Path(path)
    parts = path.parts[-levels:-1] if levels > 1 else ()
    root = path.parent
    for _ in parts:
        root = root.parent
    folder = -1
    try:
        folder = os.open(root, _PASSED)
        for part in parts:
            folder, outer = _open_folder(part, folder), folder
            os.close(outer)
        yield folder, path.name or "."
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        if folder >= 0:
            os.close(folder)


def _open_folder(name: str, folder: int) -> int:
    """Return the descriptor of a folder in `folder`; raise OSError for a link."""
    if stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode):
        raise OSError(errno.ELOOP, f"expected a folder, seen {_describe_link(name, folder)}")
    return os.open(name, _PASSED | os.O_NOFOLLOW, dir_fd=folder)


def _check_file(status: os.stat_result, name: str, folder: int, flags: int, own: bool) -> None:
    """Raise OSError unless a file is regular, `own`, and of no other name if it is written."""
    if not stat.S_ISREG(status.st_mode):
        is_link = stat.S_ISLNK(status.st_mode)
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        seen_text = _describe_link(name, folder) if is_link else kind
        raise OSError(errno.EINVAL, f"expected a regular file, seen {seen_text}")
    if own and status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"expected a file of yours, seen a file of user {status.st_uid}")
    if flags & (os.O_WRONLY | os.O_RDWR) and status.st_nlink > 1:
        raise OSError(errno.EMLINK, "expected a file with a single name, seen a hard link")


def _describe_link(name: str, folder: int) -> str:
    return f"a link to {os.readlink(name, dir_fd=folder)}"
