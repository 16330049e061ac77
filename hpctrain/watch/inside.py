"""Calls too short for a note in the record: the watch itself detects threads inside them.

MPI's all-reduce of four bytes takes well below a microsecond; notes in the record before and after
it would add a fifth to its time. So `call_unrecorded` writes nothing. Once per beat the watch looks
at the innermost frame of every thread: if it belongs to this function, and is the same as a beat
ago, the watch writes the note on the thread's behalf, and removes it when the thread has moved on.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from hpctrain.watch.code_lines import frame_of_each_thread
from hpctrain.watch.record import Entry

ALL_RANKS = -1  # the peer of a call that waits for every rank


class HasEntry(Protocol):
    """A link: it holds the entry of the thread that uses it."""

    entry: Entry


def call_unrecorded(call: Callable[[], Any], link: HasEntry, operation: bytes, nbytes: int) -> None:
    """Make a `call` that waits in C; if the thread stays in it, the watch writes the note."""
    call()


class LastingCalls:
    """The unrecorded calls in which threads were at the last beat, and their notes."""

    def __init__(self) -> None:
        self._frames: dict[int, FrameType] = {}  # held: no later frame may reuse its identity
        self._notes: dict[int, tuple[Entry, bytes]] = {}

    def scan(self) -> None:
        """Note the calls that last since the last scan; remove the notes of finished calls."""
        frames = {
            thread: frame
            for thread, frame in frame_of_each_thread().items()
            if frame.f_code is call_unrecorded.__code__
        }
        lasting_threads = {i for i, frame in frames.items() if self._frames.get(i) is frame}
        for thread in self._notes.keys() - lasting_threads:
            entry, note_bytes = self._notes.pop(thread)
            if entry.note == note_bytes:  # else the thread has written its next call over it
                entry.leave()
        for thread in lasting_threads - self._notes.keys():
            arguments = frames[thread].f_locals
            entry = arguments["link"].entry
            entry.enter(arguments["operation"], ALL_RANKS, arguments["nbytes"])
            self._notes[thread] = entry, entry.note
        self._frames = frames
