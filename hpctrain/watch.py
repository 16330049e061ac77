"""What each rank is doing, where the others can read it, and the end of a job that hangs.

Every rank keeps a *record*, one small mapped file: who it is, a heartbeat, the main thread's line,
and per thread the last Link call. It costs no system call to write and outlives even a killed rank.
A daemon thread, the *watch*, beats once a second; when a call of its own rank has waited too long
it reads all records and reports. In DIR: rank-00000, ... (removed at a clean end), hung-report.txt.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time as clock
from types import FrameType

REPORT = "hung-report.txt"
ENTRIES = 8

_MAGIC = b"hpcwtch1"
_BYTES = 4096  # one page: one fault, and the kernel writes it out as a whole
_HEADER = struct.Struct("<8siii64s")  # magic, rank, size, pid, host
_BEAT = struct.Struct("<d128s")  # heartbeat, the main thread's line
_STEP = struct.Struct("<q")
_NAME = struct.Struct("<32s")
# `waiting` comes last: a reader never sees it set before the fields that it vouches for.
_CALL = struct.Struct("<24sqqqdB")
_BEAT_AT = _HEADER.size
_STEP_AT = _BEAT_AT + _BEAT.size
_ENTRY_AT = range(512, 512 + ENTRIES * 128, 128)
_pack_call = _CALL.pack_into

_PACKAGE = str(Path(__file__).parent) + os.sep
# The entry tells the call already; the line worth knowing is the one that asked for it.
_LINKS = (_PACKAGE + "transport" + os.sep, __file__)
_LIBRARIES = (os.path.dirname(os.__file__) + os.sep, "<frozen")


@dataclass(frozen=True)
class Call:
    """The last Link call of one thread; `since` is wall-clock seconds, `peer` -1 means all."""

    thread: str
    operation: str
    step: int
    peer: int
    nbytes: int
    since: float
    waiting: bool


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

    @property
    def waits(self) -> list[Call]:
        """The calls this rank is inside of."""
        return [call for call in self.calls if call.waiting]


class Entry:
    """One thread's place in the record; only that thread writes it, so it needs no lock."""

    __slots__ = ("_at", "_flag", "_map", "_record")

    def __init__(self, record: Record, at: int) -> None:
        self._record, self._map = record, record._map
        self._at, self._flag = at, at + _CALL.size - 1

    def enter(self, operation: bytes, peer: int, nbytes: int) -> None:
        """Note that a call begins; `peer` -1 means all. Every message pays for this line."""
        _pack_call(self._map, self._at, operation, self._record._step, peer, nbytes, clock(), 1)

    def leave(self) -> None:
        """Note that the call is over; what it was stays readable as the last operation."""
        self._map[self._flag] = 0


class Record:
    """One rank's record in the file `path`, or in plain memory where `path` is None.

    The thread that makes it is the main thread whose line is shown. Raises OSError.
    """

    def __init__(self, path: Path | None, rank: int, size: int) -> None:
        self.rank, self.size, self._path = rank, size, path
        self.in_first_step = True  # a resumed run's first step is not step 0
        self._step, self._first_step = 0, -1
        self._thread, self._lock = threading.get_ident(), threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._file, self._map = _open(path)
        host = socket.gethostname().encode()
        _HEADER.pack_into(self._map, 0, _MAGIC, rank, size, os.getpid(), host)
        self.beat()
        if path is not None and rank == 0:
            # A report of an earlier job in the same folder would silence this one.
            path.with_name(REPORT).unlink(missing_ok=True)

    def entry(self, name: str) -> Entry:
        """Return the entry of the thread called `name`; raise ValueError where none is free."""
        with self._lock:
            if name not in self._entries:
                if len(self._entries) == ENTRIES:
                    raise ValueError(f"rank {self.rank}: {name}: over {ENTRIES} threads use links")
                at = _ENTRY_AT[len(self._entries)]
                _NAME.pack_into(self._map, at, name.encode())
                self._entries[name] = Entry(self, at + _NAME.size)
            return self._entries[name]

    @property
    def step(self) -> int:
        """The training step that this rank is in; entries copy it."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._first_step = value if self._first_step < 0 else self._first_step
        self._step, self.in_first_step = value, value == self._first_step
        _STEP.pack_into(self._map, _STEP_AT, value)

    def beat(self) -> None:
        """Write the heartbeat and the main thread's line, and hand the record to other hosts."""
        line = where(sys._current_frames().get(self._thread))
        _BEAT.pack_into(self._map, _BEAT_AT, clock(), line.encode())
        if self._file is not None:
            # Not mmap.flush: that may keep the interpreter locked while the disk works.
            with contextlib.suppress(OSError):
                getattr(os, "fdatasync", os.fsync)(self._file)

    def snapshot(self) -> Snapshot:
        """Return what the record holds now."""
        return _decode(bytes(self._map))

    def close(self) -> None:
        """Remove the record: this rank ends well. Its watch and links must be silent by now."""
        if self._path is not None and self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None
        if isinstance(self._map, mmap.mmap):
            self._map.close()


def _open(path: Path | None) -> tuple[int | None, mmap.mmap | bytearray]:
    if path is None:
        return None, bytearray(_BYTES)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written, not truncated to length: a full disk must fail here, not as SIGBUS in a message.
    # Renamed into place: somebody may still map the file of an earlier job.
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    os.write(file, bytes(_BYTES))
    os.replace(fresh, path)
    return file, mmap.mmap(file, _BYTES)


def where(frame: FrameType | None) -> str:
    """Return "ring.py:57 ring", the innermost line of ours or the user's that `frame` is in."""
    innermost = frame
    while frame is not None and not _telling(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "(its main thread has ended)"
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"


def _telling(filename: str) -> bool:
    if filename.startswith(_PACKAGE):
        return not filename.startswith(_LINKS)
    return not filename.startswith(_LIBRARIES) and f"-packages{os.sep}" not in filename


def record_path(directory: Path, rank: int) -> Path:
    """Return where the record of `rank` lies."""
    return directory / f"rank-{rank:05d}"


def read(path: Path) -> Snapshot:
    """Return another rank's record; raise OSError where there is none, ValueError if it is none."""
    return _decode(path.read_bytes())


def _decode(raw: bytes) -> Snapshot:
    # Its rank may be writing: any mixture of old and new bytes must decode to something.
    if len(raw) < _BYTES or not raw.startswith(_MAGIC):
        raise ValueError("not a record of this version")
    _, rank, size, pid, host = _HEADER.unpack_from(raw)
    heartbeat, line = _BEAT.unpack_from(raw, _BEAT_AT)
    (step,) = _STEP.unpack_from(raw, _STEP_AT)
    calls = tuple(_decode_call(raw, at) for at in _ENTRY_AT if raw[at + _NAME.size])
    return Snapshot(rank, size, pid, _text(host), heartbeat, step, _text(line), calls)


def _decode_call(raw: bytes, at: int) -> Call:
    (thread,) = _NAME.unpack_from(raw, at)
    operation, step, peer, nbytes, since, waiting = _CALL.unpack_from(raw, at + _NAME.size)
    return Call(_text(thread), _text(operation), step, peer, nbytes, since, bool(waiting))


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode(errors="replace")


class Watch:
    """A daemon thread that beats, and calls `on_hang(report)` once when a call waits too long.

    The limit is `timeout_s`, times `first_step_factor` in the first step (imports, compilers).
    Without a `directory` it can report its own rank alone.
    """

    def __init__(
        self,
        record: Record,
        directory: Path | None,
        timeout_s: float,
        on_hang: Callable[[str], None],
        first_step_factor: float = 10,
    ) -> None:
        self._record, self._directory, self._on_hang = record, directory, on_hang
        self._timeout_s, self._first_step_factor = timeout_s, first_step_factor
        self._awake_s, self._told = 0.0, False
        self._began: dict[tuple[str, float], float] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpctrain-watch", daemon=True)
        self._thread.start()

    def stop(self, limit_s: float = 5.0) -> None:
        """End the thread; wait for it `limit_s` at most."""
        self._end.set()
        if self._thread is not threading.current_thread():
            self._thread.join(limit_s)

    def _run(self) -> None:
        interval, before = interval_s(self._timeout_s), time.monotonic()
        while not self._end.wait(interval):
            # Only time that this process was awake counts: a job that its scheduler stopped for an
            # hour, or whose wall clock was set, must not wake up hung.
            elapsed, before = time.monotonic() - before, time.monotonic()
            self._awake_s += min(elapsed, 2 * interval)
            self._record.beat()
            self._judge()

    def _judge(self) -> None:
        keys = [(call.thread, call.since) for call in self._record.snapshot().waits]
        self._began = {key: self._began.get(key, self._awake_s) for key in keys}
        waited_s = self._awake_s - min(self._began.values(), default=self._awake_s)
        factor = self._first_step_factor if self._record.in_first_step else 1
        if waited_s > self._timeout_s * factor and not self._told:
            self._told = True
            self._on_hang(report(self._collect(), clock(), self._timeout_s))

    def _collect(self) -> list[Snapshot]:
        if self._directory is None:
            return [self._record.snapshot()]
        found = []
        for rank in range(self._record.size):
            with contextlib.suppress(OSError, ValueError):
                found.append(read(record_path(self._directory, rank)))
        return found


def interval_s(timeout_s: float) -> float:
    """Return the seconds between two heartbeats."""
    return min(1.0, timeout_s / 4)


_WAITING, _SILENT, _COMPUTING = "waiting", "stopped or dead", "alive, computing"
_LOOK = """what to do: look at the ranks that the job waits for.
  stopped or dead: look on its host for its pid (killed, out of memory?)
  computing: its stack is in stacks-RRRRR.txt; where it is only slow, raise run.timeout_s
  then start again with --resume"""
_MATCH = """what to do: make all ranks call the same operations in the same order.
  where the operations, peers and lines above differ, there it began; then --resume"""


def report(snapshots: Sequence[Snapshot], now: float, timeout_s: float) -> str:
    """Return who keeps the job waiting: first the ranks that wait for nobody, then the others."""
    judged = [(s, _judgement(s, now, timeout_s)) for s in snapshots]
    missing = set(range(max((s.size for s in snapshots), default=0))) - {s.rank for s in snapshots}
    suspects = [_line(s, j, now) for s, j in judged if j.endswith(_SILENT)]
    suspects += [f"  rank {rank}: left no record: see its output" for rank in sorted(missing)]
    suspects += [_line(s, j, now) for s, j in judged if j.endswith(_COMPUTING)]
    waiting = [_line(s, j, now) for s, j in judged if j == _WAITING]
    lines = [f"hung: a call has waited for longer than {timeout_s:g} s (run.timeout_s)"]
    lines += ["the job waits for:", *suspects] if suspects else []
    lines += ["these wait:" if suspects else "all ranks wait: mismatched calls", *waiting]
    return "\n".join([*lines, _LOOK if suspects else _MATCH])


def _judgement(s: Snapshot, now: float, timeout_s: float) -> str:
    # Silence first: a rank that was stopped inside a call still seems to wait.
    age_s = max(now - s.heartbeat, 0.0)
    if age_s > 3 * interval_s(timeout_s):  # a busy core may well swallow a beat or two
        return f"no heartbeat for {age_s:.0f} s: {_SILENT}"
    return _WAITING if s.waits else f"heartbeat {age_s:.1f} s ago: {_COMPUTING}"


def _line(s: Snapshot, judgement: str, now: float) -> str:
    last = sorted(s.calls, key=lambda call: call.since)[-1:]
    calls = ", ".join(_call(call, now) for call in s.waits or last)
    kind = "in" if s.waits else "last operation"
    name = f"  rank {s.rank} on {s.host} (pid {s.pid}), step {s.step}, at {s.line}"
    return f"{name}: {judgement}; {kind} {calls or 'none'}"


def _call(call: Call, now: float) -> str:
    peer = "all ranks" if call.peer == -1 else f"rank {call.peer}"
    since = f"begun {max(now - call.since, 0.0):.1f} s ago, step {call.step}, thread {call.thread}"
    return f"{call.operation} with {peer}, {call.nbytes} bytes, {since}"


def write_report(directory: Path, text: str) -> bool:
    """Write hung-report.txt; return True on the one rank that was first and speaks for the job."""
    try:
        with open(directory / REPORT, "x") as stream:
            stream.write(text)
    except OSError as error:
        # A full disk, a lost folder: better that all ranks speak than none.
        return not isinstance(error, FileExistsError)
    return True


def dump_stacks(path: Path) -> None:
    """Write the stacks of all threads of this process to `path`, or to stderr if that fails."""
    try:
        with open(path, "w") as stream:
            faulthandler.dump_traceback(stream, all_threads=True)
    except OSError:
        # A full disk must not keep the watch from ending the job.
        faulthandler.dump_traceback(2, all_threads=True)
