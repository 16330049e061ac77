"""The bytes of a record: a header page, then a page per thread with its last 64 operations.

    page 0    magic, rank, size, pid, host, process | heartbeat, line | step, ended | 16 threads
    page 1    thread 0:  operation  step  peer  bytes  start  end     x 64, a ring
    page 2    thread 1:  ...

A reader may come while the rank writes: any mixture of old and new bytes decodes to something.
Start and end are readings of CLOCK_MONOTONIC, which nobody sets back, so the operation that started
last is the newest. `end` is 0 while the operation lasts.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAX_ENTRIES = 16  #: names of threads: enough for the engines that a process may use in turn
MAX_CALLS = 64  #: the operations of a thread that its record keeps

MAGIC = b"hpcwtch2"
HEADER = struct.Struct("<8siii64s32s")  # magic, rank, size, pid, host, process
HEARTBEAT = struct.Struct("<d128s")  # heartbeat, the main thread's line
STEP = struct.Struct("<q")
NAME = struct.Struct("<32s")
CLOCK_OFFSET = struct.Struct("<d")  # wall-clock time less CLOCK_MONOTONIC
# Native order packs faster. `start` comes before `end`: a reader that sees a call that has started
# sees the other fields of the same call.
CALL = struct.Struct("=24sqqqdd")
HEARTBEAT_OFFSET = HEADER.size
STEP_OFFSET = HEARTBEAT_OFFSET + HEARTBEAT.size
ENDED_OFFSET = STEP_OFFSET + STEP.size
CLOCK_OFFSET_OFFSET = 480
NAME_OFFSETS = range(512, 512 + MAX_ENTRIES * NAME.size, NAME.size)
RING_BYTES = MAX_CALLS * CALL.size
RING_OFFSETS = range(4096, 4096 + MAX_ENTRIES * RING_BYTES, RING_BYTES)
RECORD_BYTES = 4096 + MAX_ENTRIES * RING_BYTES


@dataclass(frozen=True)
class Call:
    """A Link call of a thread; times are wall-clock seconds, `peer` -1 means all.

    `end_s` is None while the call lasts, and if it ended by an exception.
    """

    thread: str
    operation: str
    step: int
    peer: int
    nbytes: int
    start_s: float
    is_waiting: bool
    end_s: float | None = None


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
    calls: tuple[Call, ...]  #: the last of each thread
    has_ended: bool = False  #: whether it has reached the end of its script
    process: str = ""  #: its number and start on its host, see core/atomic.py
    history: tuple[Call, ...] = ()  #: the last operations of all threads, in the order of time

    @property
    def waiting_calls(self) -> list[Call]:
        """The calls in which this rank waits."""
        return [call for call in self.calls if call.is_waiting]


def decode(raw: bytes | memoryview, history: bool = False) -> Snapshot:
    """Return the content of a record, by default without all but the last call of each thread.

    Raises ValueError if it is no record of this version.
    """
    if len(raw) < RECORD_BYTES or raw[: len(MAGIC)] != MAGIC:
        raise ValueError("not a record of this version")
    _, rank, size, pid, host, process = HEADER.unpack_from(raw)
    heartbeat, line = HEARTBEAT.unpack_from(raw, HEARTBEAT_OFFSET)
    (step,) = STEP.unpack_from(raw, STEP_OFFSET)
    threads = [_decode_ring(raw, index, 0 if history else -1) for index in range(MAX_ENTRIES)]
    calls = tuple(ring[-1] for ring in threads if ring)
    return Snapshot(
        rank,
        size,
        pid,
        _decode_text(host),
        heartbeat,
        step,
        _decode_text(line),
        calls,
        raw[ENDED_OFFSET] > 0,
        _decode_text(process),
        tuple(sorted((call for ring in threads for call in ring), key=lambda call: call.start_s)),
    )


def decode_node(raw: bytes, history: bool = False) -> Iterator[Snapshot]:
    """Yield the records in the pages of a node's ranks; ranks that have closed are left out."""
    pages = memoryview(raw)
    for offset in range(0, len(raw) - RECORD_BYTES + 1, RECORD_BYTES):
        if raw.startswith(MAGIC, offset):
            yield decode(pages[offset : offset + RECORD_BYTES], history)


def _decode_ring(raw: bytes | memoryview, index: int, first: int) -> list[Call]:
    """Return a thread's calls from the `first` on, in the order of time."""
    thread = _decode_text(bytes(raw[NAME_OFFSETS[index] : NAME_OFFSETS[index] + NAME.size]))
    if not thread:
        return []
    (clock_offset_s,) = CLOCK_OFFSET.unpack_from(raw, CLOCK_OFFSET_OFFSET)
    ring = CALL.iter_unpack(bytes(raw[RING_OFFSETS[index] : RING_OFFSETS[index] + RING_BYTES]))
    # A call whose start is not written yet has empty fields.
    begun_calls = sorted(
        (call for call in ring if math.isfinite(call[4]) and call[4] > 0), key=_start
    )
    return [
        Call(
            thread,
            _decode_text(operation),
            step,
            peer,
            nbytes,
            start + clock_offset_s,
            is_waiting=end == 0 and start == begun_calls[-1][4],
            end_s=end + clock_offset_s if end >= start else None,
        )
        for operation, step, peer, nbytes, start, end in begun_calls[first:]
    ]


def _start(call: tuple[bytes, int, int, int, float, float]) -> float:
    return call[4]


def _decode_text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode(errors="replace")
