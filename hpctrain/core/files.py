"""Bounded reads of untrusted files: every fault is a FileError with the place in the file.

A path may name a FIFO, a device, a dangling link or a terabyte of zeros, and a file may hold any
bytes. So only regular files are opened (see opening.py, also for `levels` and `own`), a limited
number of bytes is read, and each fault is a FileError: the file, the line in it, the expected and
the actual contents.

A *log* is a file of JSON objects, a line each, that grows while a job runs. An incomplete last line
is left by a write that a crash or a full disk cut off: it does not count. Any other is damage.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from hpctrain.core.errors import UsageError
from hpctrain.core.opening import open_file

T = TypeVar("T")
MIB = 1 << 20
LINE_BYTES = 256 * MIB  #: of one line in a log: an epoch of events of many workers
_PIECE_BYTES = MIB
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class FileError(UsageError):
    """A file that cannot be read, or has unexpected contents; names the place."""


class MissingError(FileError):
    """There is no file of this name, nor a link."""


@dataclass(frozen=True)
class Log(Generic[T]):
    """The entries of a log's whole lines, and the number of bytes of a torn line after them."""

    entries: list[T]
    torn_bytes: int = 0


def expanded(name: str) -> Path:
    """Return the path of `name`, with ~ expanded to the home folder."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise FileError(f"{name}: expected the home folder of a user, seen no such user") from None


def open_regular(path: str | Path, levels: int = 1, *, own: bool = False) -> BinaryIO:
    """Open a regular file for reading; see `opening.open_file`.

    Raises MissingError where there is nothing, FileError for anything else.
    """
    try:
        return os.fdopen(open_file(path, os.O_RDONLY, levels, own=own), "rb")
    except FileNotFoundError:
        if os.path.islink(path):
            target = os.readlink(path)
            raise FileError(f"{path}: expected a file, seen a link to {target}, missing") from None
        raise MissingError(f"{path}: expected a file, seen nothing") from None
    except (OSError, ValueError) as error:  # ValueError: NUL in the path
        raise unreadable(path, error) from None


def read_bytes(path: str | Path, limit_bytes: int, levels: int = 1, *, own: bool = False) -> bytes:
    """Return the contents of a file; raise FileError if they exceed `limit_bytes`."""
    with open_regular(path, levels, own=own) as file:
        pieces = list(_read_pieces(path, file, limit_bytes))
    return b"".join(pieces)


def read_text(path: str | Path, limit_bytes: int, levels: int = 1) -> str:
    """Return the contents of a file as UTF-8 text."""
    return decoded(read_bytes(path, limit_bytes, levels), str(path))


def read_json(path: str | Path, limit_bytes: int, levels: int = 1) -> Any:
    """Return the contents of a file as a JSON value."""
    return parsed_json(read_text(path, limit_bytes, levels), str(path))


def read_json_object(path: str | Path, limit_bytes: int, levels: int = 1) -> dict[str, Any]:
    """Return the contents of a file as a JSON object."""
    return as_object(read_json(path, limit_bytes, levels), str(path))


def read_log(
    path: str | Path,
    check: Callable[[dict[str, Any]], T],
    limit_bytes: int = LINE_BYTES,
    levels: int = 1,
) -> Log[T]:
    """Return `check(object)` of each line; `check` raises ValueError for an invalid object.

    A last line without its end counts if it is whole. A line has at most `limit_bytes`.
    """
    entries: list[T] = []
    with open_regular(path, levels) as file:
        for number, line in enumerate(_read_lines(path, file, limit_bytes), start=1):
            if not (line.endswith(b"\n") or _is_object(line)):
                return Log(entries, len(line))
            entries.append(_parse_entry(line, f"{path}, line {number}", check))
    return Log(entries)


def append_lines(path: str | Path, text: str, levels: int = 1) -> None:
    """Append whole lines to a log, all or none, after its last whole line; raise OSError.

    What an earlier write that was cut off has left is removed first; a whole last line that lacks
    only its newline is kept, and gets one.
    """
    handle = open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, levels)
    try:
        end, data = _end_of_lines(handle), text.encode()
        if _is_object(os.pread(handle, _PIECE_BYTES, end)):  # all but its newline was written
            end, data = os.fstat(handle).st_size, b"\n" + data
        os.ftruncate(handle, end)
        try:
            if os.write(handle, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            os.ftruncate(handle, end)
            raise
    finally:
        os.close(handle)


def sync(path: str | Path, levels: int = 1) -> None:
    """Write what a file holds through to the disk; raise OSError."""
    handle = open_file(path, os.O_RDONLY, levels)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _end_of_lines(handle: int) -> int:
    """Return the length of a file up to the end of its last whole line."""
    end = os.fstat(handle).st_size
    while end:
        start = max(end - _PIECE_BYTES, 0)
        newline = os.pread(handle, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def decoded(data: bytes, source: str) -> str:
    """Return `data` of `source` as text."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line_text = f", line {data.count(10, 0, error.start) + 1}" * (b"\n" in data)
        byte_text = f"byte 0x{data[error.start]:02x}"
        raise FileError(f"{source}{line_text}: expected UTF-8 text, seen {byte_text}") from None


def parsed_json(text: str, source: str) -> Any:
    """Return the value of JSON `text` of `source`."""
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):  # half a surrogate pair can be neither printed nor written
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        line_text = f", line {error.lineno}" * ("\n" in text)
        place = f"{source}{line_text}, column {error.colno}"
        raise FileError(f"{place}: expected JSON ({error.msg.lower()})") from None
    except RecursionError:
        raise FileError(f"{source}: expected JSON, seen too many levels") from None
    except UnicodeEncodeError:
        raise FileError(f"{source}: expected JSON, seen half of a surrogate pair") from None
    except ValueError:
        raise FileError(f"{source}: expected JSON, seen an integer of too many digits") from None


def as_object(value: Any, source: str) -> dict[str, Any]:
    """Return `value` if it is a JSON object."""
    if not isinstance(value, dict):
        raise FileError(f"{source}: expected a JSON object, seen {brief(value)}")
    return value


def brief(value: Any, length: int = 60) -> str:
    """Return a value for an error message: one line, no control characters, at most `length`."""
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def unreadable(path: str | Path, error: OSError | ValueError) -> FileError:
    """Return the FileError with the reason why `path` cannot be read."""
    if isinstance(error, FileError):
        return error
    reason = (isinstance(error, OSError) and error.strerror) or error
    name = str(path).replace("\0", "\\0")
    is_odd = str(reason).startswith("expected")  # of open_file
    return FileError(f"{name}: {reason}" if is_odd else f"{name} cannot be read: {reason}")


def _read_pieces(path: str | Path, file: BinaryIO, limit_bytes: int) -> Iterator[bytes]:
    size, total = os.fstat(file.fileno()).st_size, 0
    # A file may grow meanwhile, and files in /proc have no size.
    while size <= limit_bytes and (piece := _read_guarded(path, lambda: file.read(_PIECE_BYTES))):
        yield piece
        size = total = total + len(piece)
    if size > limit_bytes:
        raise FileError(f"{path}: expected at most {limit_bytes} bytes, seen {size}")


def _read_lines(path: str | Path, file: BinaryIO, limit_bytes: int) -> Iterator[bytes]:
    pieces, length = list[bytes](), 0
    while piece := _read_guarded(path, lambda: file.readline(_PIECE_BYTES)):
        length += len(piece)
        if length > limit_bytes:
            raise FileError(f"{path}: expected lines of at most {limit_bytes} bytes, seen a longer")
        if not pieces or piece.count(0) < len(piece):  # the zeros of a hole take no memory
            pieces.append(piece)
        if piece.endswith(b"\n"):
            yield b"".join(pieces)
            pieces, length = [], 0
    if pieces:
        yield b"".join(pieces)


def _read_guarded(path: str | Path, read: Callable[[], bytes]) -> bytes:
    try:
        return read()
    except OSError as error:
        raise unreadable(path, error) from None


def _is_object(line: bytes) -> bool:
    """Return whether a line is a whole JSON object; a cut one is not."""
    try:
        as_object(parsed_json(decoded(line, ""), ""), "")
    except FileError:
        return False
    return True


def _parse_entry(line: bytes, source: str, check: Callable[[dict[str, Any]], T]) -> T:
    value = as_object(parsed_json(decoded(line.rstrip(b"\n"), source), source), source)
    try:
        return check(value)
    except FileError:
        raise
    except ValueError as error:
        raise FileError(f"{source}: {error}") from None
