"""Calls too short to be noted: the watch itself finds a thread that stays inside one.

MPI's all-reduce of four bytes takes well below a microsecond; a note in the record before it and
one after would take a fifth of that. So `unnoted` notes nothing. Once per beat the watch looks at
the innermost frame of every thread: if it is that of an unnoted call, and the same as a beat ago,
the watch writes the note on the thread's behalf, and removes it when the thread has moved on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, Protocol

from hpctrain.watch.record import Entry

ALL = -1  # the peer of a call that waits for every rank


class HasEntry(Protocol):
    """What knows the entry of the thread that uses it: a link."""

    entry: Entry


class About(NamedTuple):
    """What the watch is to note of a call."""

    link: HasEntry
    operation: bytes
    nbytes: int


def unnoted(call: Callable[[], Any], about: About) -> Callable[[], Any]:
    """Return `call` in a frame by which the watch knows it."""

    def inside(call: Callable[[], Any] = call, about: About = about) -> Any:
        return call()

    return inside


_CODE = unnoted(len, None).__code__  # type: ignore[arg-type]


class Insides:
    """The unnoted calls in which threads were at the last beat, and what was noted of them."""

    def __init__(self) -> None:
        self._frames: dict[int, FrameType] = {}  # held, so that no later frame can be taken for one
        self._noted: dict[int, tuple[Entry, bytes]] = {}

    def look(self) -> None:
        """Note the calls that last since the last look; remove the notes of those that are over."""
        frames = {i: f for i, f in sys._current_frames().items() if f.f_code is _CODE}
        lasting = {i for i, frame in frames.items() if self._frames.get(i) is frame}
        for thread in self._noted.keys() - lasting:
            entry, note = self._noted.pop(thread)
            if entry.note == note:  # else the thread has written its next call over it
                entry.leave()
        for thread in lasting - self._noted.keys():
            link, operation, nbytes = frames[thread].f_locals["about"]
            link.entry.enter(operation, ALL, nbytes)
            self._noted[thread] = link.entry, link.entry.note
        self._frames = frames
