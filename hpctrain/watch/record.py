"""The record of one rank: its current calls, in a mapped page that other ranks can read."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time as clock
from types import FrameType
from typing import Any

REPORT_NAME = "hung-report.txt"  #: by the one rank that reports a hung job
MAX_ENTRIES = 16  #: names of threads: those of all engines that one process may use in turn

_MAGIC = b"hpcwtch1"
RECORD_BYTES = 4096  # one page: one fault, and the kernel writes it out as a whole
_HEADER_FORMAT = struct.Struct("<8siii64s")  # magic, rank, size, pid, host
_HEARTBEAT_FORMAT = struct.Struct("<d128s")  # heartbeat, the main thread's line
_STEP_FORMAT = struct.Struct("<q")
_NAME_FORMAT = struct.Struct("<32s")
# `is_waiting` comes last: a reader never sees it set before the fields that it makes valid.
_CALL_FORMAT = struct.Struct("<24sqqqdB")
_HEARTBEAT_OFFSET = _HEADER_FORMAT.size
_STEP_OFFSET = _HEARTBEAT_OFFSET + _HEARTBEAT_FORMAT.size
_ENDED_OFFSET = _STEP_OFFSET + _STEP_FORMAT.size
_ENTRY_OFFSETS = range(512, 512 + MAX_ENTRIES * 128, 128)
_pack_call = _CALL_FORMAT.pack_into

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
# The entry names the call already; the useful line is that of its caller.
_LINK_FOLDERS = (_PACKAGE + "transport" + os.sep, _PACKAGE + "watch" + os.sep)
_LIBRARY_FOLDERS = (os.path.dirname(os.__file__) + os.sep, "<frozen")
_SCRIPTS_FOLDER = os.path.dirname(sys.executable) + os.sep  # of entry points, such as `hpctrain`


@dataclass(frozen=True)
class Call:
    """The last Link call of one thread; `start_s` is wall-clock seconds, `peer` -1 means all."""

    thread: str
    operation: str
    step: int
    peer: int
    nbytes: int
    start_s: float
    is_waiting: bool


@dataclass(frozen=True)
class Snapshot:
    """One rank's record at the moment it was read; `heartbeat` is wall-clock seconds."""

    rank: int
    size: int
    pid: int
    host: str
    heartbeat: float
    step: int
    line: str
    calls: tuple[Call, ...]
    has_ended: bool = False  #: whether it has reached the end of its script

    @property
    def waiting_calls(self) -> list[Call]:
        """The calls in which this rank waits."""
        return [call for call in self.calls if call.is_waiting]


class Entry:
    """One thread's place in the record; only that thread writes it, so it needs no lock."""

    __slots__ = ("_map", "_offset", "_record", "_waiting_offset")

    def __init__(self, record: WatchRecord, offset: int) -> None:
        self._record, self._map = record, record._map
        self._offset, self._waiting_offset = offset, offset + _CALL_FORMAT.size - 1

    def enter(self, operation: bytes, peer: int, nbytes: int) -> None:
        """Note that a call begins; `peer` -1 means all. On the path of every message."""
        _pack_call(self._map, self._offset, operation, self._record._step, peer, nbytes, clock(), 1)

    def leave(self) -> None:
        """Note that the call is over; its note stays readable as the last operation."""
        self._map[self._waiting_offset] = 0

    def report_ranks(self, timeout_s: float) -> str:
        """Return the report of a wait longer than `timeout_s`, from the records of this node."""
        from hpctrain.watch.report import make_report

        snapshots = self._record.node_snapshots()
        return make_report(snapshots, clock(), timeout_s, has_folder=False)

    @property
    def note(self) -> bytes:
        """The bytes that `enter` wrote last."""
        return bytes(self._map[self._offset : self._waiting_offset + 1])


class WatchRecord:
    """One rank's record in the file `path`, or in plain memory where `path` is None.

    The thread that makes it is the main thread whose line is shown. Raises OSError.
    """

    def __init__(
        self, path: Path | None, rank: int, size: int, node_pages: Sequence[Any] = ()
    ) -> None:
        """`node_pages`: the records of this node's ranks, in memory that they share, ours first."""
        self.rank, self.size, self._path, self._node_pages = rank, size, path, node_pages
        self.in_first_step = True  # a resumed run's first step is not step 0
        self._step, self._first_step = 0, -1
        self._thread, self._lock = threading.get_ident(), threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._descriptor: int | None = None
        self._map: mmap.mmap | bytearray | memoryview
        if node_pages:
            self._map = memoryview(node_pages[0])
        else:
            self._descriptor, self._map = _open_record(path)
        host = socket.gethostname().encode()
        _HEADER_FORMAT.pack_into(self._map, 0, _MAGIC, rank, size, os.getpid(), host)
        self.write_heartbeat()
        if path is not None and rank == 0:
            # A report of an earlier job in the same folder would silence this one.
            path.with_name(REPORT_NAME).unlink(missing_ok=True)

    def entry(self, name: str) -> Entry:
        """Return the entry of the thread called `name`; raise ValueError where none is free."""
        with self._lock:
            if name not in self._entries:
                if len(self._entries) == MAX_ENTRIES:
                    raise ValueError(
                        f"rank {self.rank}: {name}: over {MAX_ENTRIES} threads use links"
                    )
                offset = _ENTRY_OFFSETS[len(self._entries)]
                _NAME_FORMAT.pack_into(self._map, offset, name.encode())
                self._entries[name] = Entry(self, offset + _NAME_FORMAT.size)
            return self._entries[name]

    @property
    def step(self) -> int:
        """The training step that this rank is in; entries copy it."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._first_step = value if self._first_step < 0 else self._first_step
        self._step, self.in_first_step = value, value == self._first_step
        _STEP_FORMAT.pack_into(self._map, _STEP_OFFSET, value)

    def mark_ended(self) -> None:
        """Note that this rank has reached the end of its script and waits there for the others."""
        self._map[_ENDED_OFFSET] = 1

    def write_heartbeat(self) -> None:
        """Write the heartbeat and the main thread's line, and hand the record to other hosts."""
        line = code_location(frame_of_each_thread().get(self._thread))
        _HEARTBEAT_FORMAT.pack_into(self._map, _HEARTBEAT_OFFSET, clock(), line.encode())
        if self._descriptor is not None:
            # Not mmap.flush: that may keep the interpreter locked while the disk works.
            with contextlib.suppress(OSError):
                getattr(os, "fdatasync", os.fsync)(self._descriptor)

    def snapshot(self) -> Snapshot:
        """Return the present content of the record."""
        return _decode(bytes(self._map))

    def node_snapshots(self) -> list[Snapshot]:
        """Return the records of this node's ranks that share memory; at least this rank's."""
        own = self.snapshot()
        neighbours = [_decode(page.tobytes()) for page in self._node_pages[1:]]
        return sorted([own, *neighbours], key=lambda snapshot: snapshot.rank)

    def close(self) -> None:
        """Remove the record at a clean end. Its watch and links must have stopped before."""
        if self._path is not None and self._descriptor is not None:
            with contextlib.suppress(OSError):  # on a full disk it stays, which does no harm
                self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = None
        if isinstance(self._map, mmap.mmap):
            self._map.close()


def _open_record(path: Path | None) -> tuple[int | None, mmap.mmap | bytearray]:
    if path is None:
        return None, bytearray(RECORD_BYTES)
    path.parent.mkdir(parents=True, exist_ok=True)
    for temporary in path.parent.glob(f".{path.name}.*"):  # of a killed rank, or of a full disk
        temporary.unlink(missing_ok=True)
    # Written, not truncated to length: a full disk must fail here, not as SIGBUS in a message.
    # Renamed into place: another process may still map the file of an earlier job.
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    if os.write(descriptor, bytes(RECORD_BYTES)) < RECORD_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    os.replace(temporary_path, path)
    return descriptor, mmap.mmap(descriptor, RECORD_BYTES)


def frame_of_each_thread() -> dict[int, FrameType]:
    """Return the frame in which each thread is.

    CPython 3.11 before 3.11.9 holds a lock meanwhile that threads take to begin and to end, and
    may collect garbage: finalizers let another thread run, which may then wait for that lock, and
    does so with the interpreter's own (gh-106883). So nothing is collected now.
    """
    gc_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if gc_enabled:
            gc.enable()


def code_location(frame: FrameType | None) -> str:
    """Return the innermost line of `frame` in the user's code, and the one in hpctrain below it.

    As "train.py:9 main, ring.py:57 ring"; without any of the two, the innermost line of all.
    """
    if frame is None:
        return "(its main thread has ended)"
    own = _innermost(frame, _is_relevant)
    users = _innermost(own, _is_users)
    lines = dict.fromkeys(_describe_line(found) for found in (users, own) if found is not None)
    return ", ".join(lines) or _describe_line(frame)


def _innermost(frame: FrameType | None, is_wanted: Callable[[str], bool]) -> FrameType | None:
    while frame is not None and not is_wanted(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _describe_line(frame: FrameType) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"


def _is_relevant(filename: str) -> bool:
    if filename.startswith(_PACKAGE):
        return not filename.startswith(_LINK_FOLDERS)
    return _is_users(filename)


def _is_users(filename: str) -> bool:
    is_library = filename.startswith((*_LIBRARY_FOLDERS, _PACKAGE, _SCRIPTS_FOLDER))
    return not is_library and f"-packages{os.sep}" not in filename


def record_path(directory: Path, rank: int) -> Path:
    """Return the path of the record of `rank`."""
    return directory / f"rank-{rank:05d}"


def read_record(path: Path) -> Snapshot:
    """Return another rank's record; raise OSError where there is none, ValueError if it is none."""
    return _decode(path.read_bytes())


def _decode(raw: bytes) -> Snapshot:
    # Its rank may be writing: any mixture of old and new bytes must decode to something.
    if len(raw) < RECORD_BYTES or not raw.startswith(_MAGIC):
        raise ValueError("not a record of this version")
    _, rank, size, pid, host = _HEADER_FORMAT.unpack_from(raw)
    heartbeat, line = _HEARTBEAT_FORMAT.unpack_from(raw, _HEARTBEAT_OFFSET)
    (step,) = _STEP_FORMAT.unpack_from(raw, _STEP_OFFSET)
    calls = tuple(_decode_call(raw, at) for at in _ENTRY_OFFSETS if raw[at + _NAME_FORMAT.size])
    host_name, line_text, has_ended = _decode_text(host), _decode_text(line), raw[_ENDED_OFFSET] > 0
    return Snapshot(rank, size, pid, host_name, heartbeat, step, line_text, calls, has_ended)


def _decode_call(raw: bytes, offset: int) -> Call:
    (thread,) = _NAME_FORMAT.unpack_from(raw, offset)
    operation, step, peer, nbytes, start_s, is_waiting = _CALL_FORMAT.unpack_from(
        raw, offset + _NAME_FORMAT.size
    )
    return Call(
        _decode_text(thread), _decode_text(operation), step, peer, nbytes, start_s, bool(is_waiting)
    )


def _decode_text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode(errors="replace")
