"""The record of a rank: its current and last calls, in pages that other ranks can read."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle
from time import monotonic
from time import time as clock
from typing import Any

from hpctrain.core.atomic import process_identity
from hpctrain.watch.code_lines import code_location
from hpctrain.watch.layout import (
    CALL,
    CLOCK_OFFSET,
    CLOCK_OFFSET_OFFSET,
    ENDED_OFFSET,
    HEADER,
    HEARTBEAT,
    HEARTBEAT_OFFSET,
    MAGIC,
    MAX_ENTRIES,
    NAME,
    NAME_OFFSETS,
    RECORD_BYTES,
    RING_BYTES,
    RING_OFFSETS,
    STEP,
    STEP_OFFSET,
    Snapshot,
    decode,
)

_pack_call = CALL.pack_into
_WORD_BYTES = 8
#: The clocks drift apart by less in a day; a larger difference is a clock that was set.
_CLOCK_STEP_S = 0.1


class Entry:
    """One thread's calls in the record; only that thread writes them, so it needs no lock."""

    __slots__ = ("_end", "_map", "_next_call", "_record", "_words")

    def __init__(self, record: WatchRecord, offset: int) -> None:
        self._record, self._map, self._words = record, record._map, record._words
        starts = range(offset, offset + RING_BYTES, CALL.size)
        # Each call's offset in bytes, and the offset of its end in words.
        calls = [(at, (at + CALL.size) // _WORD_BYTES - 1) for at in starts]
        self._next_call = cycle(calls).__next__
        self._end = (offset + RING_BYTES) // _WORD_BYTES - 1

    def enter(self, operation: bytes, peer: int, nbytes: int) -> None:
        """Note that a call begins; `peer` -1 means all. On the path of every message."""
        at, self._end = self._next_call()
        _pack_call(self._map, at, operation, self._record._step, peer, nbytes, monotonic(), 0.0)

    def leave(self) -> None:
        """Note that the call is over; it stays readable until 64 others have begun."""
        self._words[self._end] = monotonic()

    def report_ranks(self, timeout_s: float) -> str:
        """Return the report of a wait longer than `timeout_s`, from the records of this node."""
        from hpctrain.watch.report import make_report

        snapshots = self._record.node_snapshots()
        return make_report(snapshots, clock(), timeout_s, has_folder=False).text

    @property
    def note(self) -> bytes:
        """The bytes that `enter` wrote last."""
        end = self._end * _WORD_BYTES
        return bytes(self._map[end + _WORD_BYTES - CALL.size : end + _WORD_BYTES])


class WatchRecord:
    """One rank's record in pages that the ranks of its node share, or in plain memory.

    The thread that makes it is the main thread whose line is shown.
    """

    def __init__(self, rank: int, size: int, node_pages: Sequence[Any] = ()) -> None:
        """`node_pages`: the records of this node's ranks, in memory that they share, ours first."""
        self.rank, self.size = rank, size
        self._node_pages = [memoryview(page) for page in node_pages or [bytearray(RECORD_BYTES)]]
        self.in_first_step = True  # a resumed run's first step is not step 0
        self._step, self._first_step = 0, -1
        self._thread, self._lock = threading.get_ident(), threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._map, self._words = self._node_pages[0], self._node_pages[0].cast("d")
        self._map[:] = bytes(RECORD_BYTES)
        self.write_heartbeat()
        host, process = socket.gethostname().encode(), process_identity(os.getpid()).encode()
        # Last: a record without its first bytes is none.
        HEADER.pack_into(self._map, 0, MAGIC, rank, size, os.getpid(), host, process)

    def entry(self, name: str) -> Entry:
        """Return the entry of the thread `name`, which names it in reports."""
        with self._lock:
            if name not in self._entries:
                if len(self._entries) == MAX_ENTRIES:
                    raise ValueError(
                        f"rank {self.rank}: {name}: over {MAX_ENTRIES} threads use links"
                    )
                index = len(self._entries)
                NAME.pack_into(self._map, NAME_OFFSETS[index], name.encode())
                self._entries[name] = Entry(self, RING_OFFSETS[index])
            return self._entries[name]

    def replacing(self, previous: WatchRecord | None) -> WatchRecord:
        """Return this record; let the `previous` record forget its entries, which refer to it.

        Else its pages would stay mapped until a collector of garbage runs.
        """
        if previous is not None and previous is not self:
            with previous._lock:
                previous._entries = {}
        return self

    @property
    def step(self) -> int:
        """The training step that this rank is in; entries copy it."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._first_step = value if self._first_step < 0 else self._first_step
        self._step, self.in_first_step = value, value == self._first_step
        STEP.pack_into(self._map, STEP_OFFSET, value)

    @property
    def node_size(self) -> int:
        """The number of ranks whose records lie in the same memory, including this rank."""
        return len(self._node_pages)

    def mark_ended(self) -> None:
        """Note that this rank has reached the end of its script, and waits for other ranks."""
        self._map[ENDED_OFFSET] = 1

    def write_heartbeat(self) -> None:
        """Write the heartbeat and the main thread's line."""
        line = code_location(self._thread)
        HEARTBEAT.pack_into(self._map, HEARTBEAT_OFFSET, clock(), line.encode())
        # Only where the clock was set: the times of calls are what tells a new one from another.
        offset_s = clock() - monotonic()
        if abs(offset_s - CLOCK_OFFSET.unpack_from(self._map, CLOCK_OFFSET_OFFSET)[0]) > (
            _CLOCK_STEP_S
        ):
            CLOCK_OFFSET.pack_into(self._map, CLOCK_OFFSET_OFFSET, offset_s)

    def snapshot(self) -> Snapshot:
        """Return the present content of the record."""
        return decode(self._map)

    def node_bytes(self) -> bytes:
        """Return the records of this node's ranks."""
        return b"".join(self._node_pages)

    def node_snapshots(self, history: bool = False) -> list[Snapshot]:
        """Return the records of this node's ranks that share memory, by default without history."""
        snapshots = []
        for page in self._node_pages:
            with suppress(ValueError):  # it has no record yet, or none any more
                snapshots.append(decode(page, history))
        return sorted(snapshots, key=lambda s: s.rank)

    def node_heartbeats(self) -> dict[int, float]:
        """Return the heartbeats of this node's ranks that share memory, by their process ids."""
        pages = [page for page in self._node_pages if page[: len(MAGIC)] == MAGIC]
        return {
            HEADER.unpack_from(page)[3]: HEARTBEAT.unpack_from(page, HEARTBEAT_OFFSET)[0]
            for page in pages
        }

    def speaks_for_node(self, silent_s: float) -> bool:
        """Return whether this is the first rank of the node that has a heartbeat."""
        snapshots = (s for s in self.node_snapshots() if clock() - s.heartbeat < silent_s)
        return next((s.rank == self.rank for s in snapshots), True)

    def close(self) -> None:
        """Remove the record at a clean end. Its watch and links must have stopped before."""
        self._map[: len(MAGIC)] = bytes(len(MAGIC))
