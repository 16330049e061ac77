"""Calls too short for a note in the record: the watch itself detects a thread inside one.

MPI's all-reduce of four bytes takes well below a microsecond; a note in the record before it and
one after would take a fifth of that. So a function that is `detect_waits` notes nothing. Once per
beat the watch looks at the innermost frame of every thread: if it is that of such a function, and
the same as a beat ago, the watch writes the note on the thread's behalf, and removes it when the
thread has moved on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol, TypeVar

from hpctrain.watch.record import Entry, frame_of_each_thread

ALL_RANKS = -1  # the peer of a call that waits for every rank
F = TypeVar("F", bound=Callable[..., Any])


class HasEntry(Protocol):
    """A link: it holds the entry of the thread that uses it."""

    entry: Entry


class CallNote(NamedTuple):
    """The note that the watch writes for a call."""

    link: HasEntry
    operation: bytes
    nbytes: int


Locals = Mapping[str, Any]
_NOTE_FUNCTIONS: dict[CodeType, Callable[[Locals], CallNote | None]] = {}


def detect_waits(note: Callable[[Locals], CallNote | None]) -> Callable[[F], F]:
    """Mark a function that waits in C, so that the watch detects a thread that stays in it.

    `note` returns the note from the function's local variables; None if it does not wait.
    """

    def register(function: F) -> F:
        _NOTE_FUNCTIONS[function.__code__] = note
        return function

    return register


def make_detectable(call: Callable[[], Any], note: CallNote) -> Callable[[], Any]:
    """Return `call` wrapped in a function whose frame the watch recognizes."""

    @detect_waits(lambda local_variables: local_variables["note"])
    def call_inside(call: Callable[[], Any] = call, note: CallNote = note) -> Any:
        return call()

    return call_inside


class LastingCalls:
    """The detectable calls in which threads were at the last beat, and their notes."""

    def __init__(self) -> None:
        self._frames: dict[int, FrameType] = {}  # held: no later frame may reuse its identity
        self._notes: dict[int, tuple[Entry, bytes]] = {}

    def scan(self) -> None:
        """Note the calls that last since the last scan; remove the notes of those that are over."""
        frames = {i: f for i, f in frame_of_each_thread().items() if f.f_code in _NOTE_FUNCTIONS}
        lasting_threads = {i for i, frame in frames.items() if self._frames.get(i) is frame}
        for thread in self._notes.keys() - lasting_threads:
            entry, note_bytes = self._notes.pop(thread)
            if entry.note == note_bytes:  # else the thread has written its next call over it
                entry.leave()
        for thread in lasting_threads - self._notes.keys():
            frame = frames[thread]
            if (note := _NOTE_FUNCTIONS[frame.f_code](frame.f_locals)) is not None:
                note.link.entry.enter(note.operation, ALL_RANKS, note.nbytes)
                self._notes[thread] = note.link.entry, note.link.entry.note
        self._frames = frames
