"""Calls too short for a note in the record: the watch itself detects threads inside them.

MPI's all-reduce of four bytes takes well below a microsecond; notes in the record before and after
it would add a fifth to its time. So `unrecorded` calls write nothing. Once per beat the watch looks
at the innermost frame of every thread: if its variable `bound_call` is such a call, and the frame
is the same as a beat ago, the watch writes the note on the thread's behalf, and removes it when the
thread has moved on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Protocol

from hpctrain.watch.code_lines import frame_of_each_thread
from hpctrain.watch.record import Entry

ALL_RANKS = -1  # the peer of a call that waits for every rank
VARIABLE = "bound_call"  # of the functions in whose frames the watch detects threads


class HasEntry(Protocol):
    """A link: it holds the entry of the thread that uses it."""

    entry: Entry


def unrecorded(
    call: Callable[[], Any], link: HasEntry, operation: bytes, nbytes: int
) -> Callable[[], Any]:
    """Return `call`, a partial that waits in C; if a thread stays in it, the watch notes it."""
    call.note = link, operation, nbytes  # type: ignore[attr-defined]  # a partial has attributes
    return partial(_make_call, call)


def _make_call(bound_call: Callable[[], Any]) -> None:
    bound_call()


def frameless(call: Any) -> Any:
    """Return `call`; if it is `unrecorded`, without the Python frame that the watch detects.

    For callers that hold it in a variable `bound_call`: a frame takes a tenth of a short call.
    """
    return call.args[0] if getattr(call, "func", None) is _make_call else call


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
            if VARIABLE in frame.f_code.co_varnames + frame.f_code.co_freevars
        }
        lasting_threads = {i for i, frame in frames.items() if self._frames.get(i) is frame}
        for thread in self._notes.keys() - lasting_threads:
            entry, note_bytes = self._notes.pop(thread)
            if entry.note == note_bytes:  # else the thread has written its next call over it
                entry.leave()
        for thread in lasting_threads - self._notes.keys():
            call = frames[thread].f_locals.get(VARIABLE)
            if note := getattr(call, "note", None):  # else it waits for something else
                link, operation, nbytes = note
                link.entry.enter(operation, ALL_RANKS, nbytes)
                self._notes[thread] = link.entry, link.entry.note
        self._frames = frames
