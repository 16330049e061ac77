"""A detector of races: accesses to memory that nothing orders raise, whatever the schedule was.

    stream a   [ add to x ][ * event e ]            x: written by a at 1
    stream b   [ wait for e ][ read x ]             b knows a up to 1: ordered
    host       [ send x ]                           the host knows nothing of a: a race

Each stream and each thread of the host has a vector clock: how far it knows the others. What is
issued to a stream comes after what its thread did before; events, waits for streams and events, and
what threads hand each other (see handoffs.py) join clocks. Of each allocation of a device, and of
pinned memory, the last accesses are kept by their ranges of bytes. A posted message is an access
from its post until a test or a wait says that it is complete; memory that is given back is written
by whoever drops it, in the stream for which it was allocated. What NumPy reads and writes in pinned
memory is not seen.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from pathlib import Path

from fakes.machine import machine

HERE = str(Path(__file__).parent)
_numbers = itertools.count(1)


class RaceError(AssertionError):
    """Two accesses to the same bytes, one of them a write, that nothing orders."""


class _Lock:
    """A lock whose holder runs no finalizers of cycles: they may wait for streams, or for it."""

    def __init__(self):
        self._lock, self._depth, self._collects = threading.RLock(), 0, False

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._collects = gc.isenabled()
            gc.disable()

    def __exit__(self, *_) -> None:
        self._depth -= 1
        if not self._depth and self._collects:
            gc.enable()
        self._lock.release()


class Clock:
    """How far a stream or a thread knows itself and the others, by their numbers."""

    def __init__(self, name: str):
        self.name, self.number, self._version = name, next(_numbers), 0
        self.epochs: dict[int, int] = {}
        self._joined: dict[int, int] = {}
        self._snapshot: tuple[int, dict[int, int]] = (0, {})

    def tick(self) -> int:
        """Return the epoch of a new access: who joined this clock before does not know it."""
        self.epochs[self.number] = epoch = self.epochs.get(self.number, 0) + 1
        self._version += 1
        return epoch

    def join(self, other: Clock) -> None:
        """Know all that `other` knows now."""
        if self._joined.get(other.number) != other._version:
            self._joined[other.number] = other._version
            self.merge(other.epochs)

    def merge(self, epochs: dict[int, int]) -> None:
        """Know what `epochs` say."""
        own, is_new = self.epochs, False
        for number, epoch in epochs.items():
            if own.get(number, 0) < epoch:
                own[number], is_new = epoch, True
        self._version += is_new

    def snapshot(self) -> dict[int, int]:
        """Return what is known now, for somebody else to merge."""
        if self._snapshot[0] != self._version:
            self._snapshot = (self._version, dict(self.epochs))
        return self._snapshot[1]


class Access:
    """A range of bytes that a clock reads or writes; open, without one, until a message is done."""

    __slots__ = ("clock", "epoch", "high", "low", "name", "place", "region", "text", "writes")

    def __init__(self, clock, name, home, nbytes, writes, text, place):
        self.region, _, self.low = home
        self.clock, self.name, self.high, self.writes = clock, name, self.low + nbytes, writes
        self.epoch = 0 if clock is None else clock.tick()
        self.text, self.place = text, place

    def precedes(self, clock: Clock) -> bool:
        """Return whether all of it happened before what `clock` does now."""
        own = self.clock
        return own is clock or (own is not None and clock.epochs.get(own.number, 0) >= self.epoch)

    def __str__(self) -> str:
        verb, (path, line) = "writes" if self.writes else "reads", self.place
        still = " (not complete)" if self.clock is None else ""
        range_ = f"bytes {self.low:,} to {self.high:,}"
        return f"{self.name}: {self.text} {verb} {range_} ({path}:{line}){still}"


class Races:
    """The clocks and the last accesses of a machine, and the races, as `errors`.

    Nothing that takes another lock runs under `lock`, since threads that hold the machine's come
    here.
    """

    def __init__(self):
        self.lock = _Lock()
        self.errors: list[RaceError] = []
        self.homes: dict[int, object] = {}  # of memory that has several addresses
        self._last: dict[object, list[Access]] = {}
        self._hosts: dict[int, Clock] = {}  # by the numbers of threads, which end

    def host(self) -> Clock:
        """Return the clock of this thread, which knows what its parent did before its start."""
        local = machine().here
        clock = getattr(local, "clock", None)
        if clock is None and threading.get_ident() not in threading._active:
            clock = self._hosts.get(threading.get_ident())  # it ends, and has lost what is local
        if clock is None:
            thread = threading.current_thread()
            clock = local.clock = thread.__dict__["race_clock"] = Clock(f"thread {thread.name}")
            clock.merge(thread.__dict__.get("race_parent", {}))
            self._hosts[threading.get_ident()] = clock
        return clock

    def snapshot(self) -> dict[int, int]:
        """Return what this thread knows, without a lock: for finalizers, also as a thread ends."""
        clock = self._hosts.get(threading.get_ident())
        return {} if clock is None else clock.snapshot()

    def order(self, stream, event: dict[int, int] | None = None) -> Clock:
        """Return the clock of `stream` for work that this thread gives it now, after `event`."""
        clock, before = stream.clock, stream.ordered_before()
        with self.lock:
            clock.join(self.host())
            for other in before:
                clock.join(other.clock)
            if event:
                clock.merge(event)
        return clock

    def work(self, stream, text: str, reads=(), writes=()) -> None:
        """Note work of a stream on ranges (address, bytes)."""
        ranges = [(*x, False) for x in reads] + [(*x, True) for x in writes]
        homes = [(self._home(*x), *x[1:]) for x in ranges]
        clock, place = self.order(stream), _place()
        with self.lock:
            for home, nbytes, writing in homes:
                if home is not None:
                    self._note(clock, clock, home, nbytes, writing, text, place)

    def post(self, address: int, nbytes: int, writes: bool, text: str) -> Access | None:
        """Note a message that is posted by this thread; None if its memory is not watched."""
        home, place = self._home(address, nbytes), _place()
        if home is None:
            return None
        with self.lock:
            return self._note(self.host(), None, home, nbytes, writes, text, place)

    def complete(self, access: Access) -> None:
        """Note that a message is complete, and that this thread knows it."""
        with self.lock:
            if access.clock is None:
                access.clock, access.epoch = self.host(), self.host().tick()

    def wait(self, epochs: Clock | dict[int, int]) -> None:
        """This thread has waited for a clock, or for what an event knows."""
        with self.lock:
            host = self.host()
            host.join(epochs) if isinstance(epochs, Clock) else host.merge(epochs)

    def release(self, address: int, epochs: list[dict[int, int]], waits: bool) -> None:
        """Forget memory that was given back by a thread with `epochs`: it comes after all work.

        `waits`: for what was done by this address, as cudaFree does, not for a neighbour's work.
        """
        with self.lock:
            clock, home = Clock("the pool"), self.homes.pop(address, address)
            for part in epochs:
                clock.merge(part)
            for access in self._last.pop(home, ()):
                own = waits and access.clock is not None and access.region == address
                if not own and not access.precedes(clock):
                    text = "race: memory is given back, and nothing orders that after"
                    self.errors.append(RaceError(f"{text}\n  {access}"))

    def _home(self, address: int, nbytes: int, *_) -> tuple[int, object, int] | None:
        """Return where an address lies: the start of its region, the memory, and the offset in it.

        None for plain memory of the host.
        """
        region = machine().region(address) if nbytes else None
        start = region[0] if region else machine().pinned_start(address) if nbytes else None
        return None if start is None else (start, self.homes.get(start, start), address - start)

    def _note(self, clock, actor, home, nbytes, writes, text, place) -> Access:
        new, key = Access(actor, clock.name, home, nbytes, writes, text, place), home[1]
        remaining = []
        for old in self._last.get(key, ()):
            if old.low >= new.high or new.low >= old.high:
                remaining.append(old)
                continue
            precedes = old.precedes(clock)
            if (writes or old.writes) and not precedes:
                self.errors.append(RaceError(f"race: nothing orders\n  {old}\n  {new}"))
                raise self.errors[-1]
            covered = new.low <= old.low and old.high <= new.high
            if not (covered and precedes and actor is not None and (writes or not old.writes)):
                remaining.append(old)
        self._last[key] = [*remaining, new]
        return new


def note(stream, text: str, reads=(), writes=()) -> None:
    """Note work of `stream` on ranges (address, bytes), where races are looked for."""
    machine().here.has_context = True
    races = machine().races
    if races is not None:
        races.work(stream, text, reads, writes)


def name_of(function) -> str:
    """Return the name of a function, of a lambda that of where it stands."""
    return getattr(function, "__qualname__", str(function)).removesuffix(".<locals>.<lambda>")


def waited(stream) -> None:
    """Note that this thread has waited for `stream`."""
    if machine().races is not None:
        machine().races.wait(stream.clock)


def record(stream, event) -> None:
    """Let `event` know what `stream` knows now."""
    if machine().races is not None:
        event.epochs = machine().races.order(stream).snapshot()


def waits(stream, event) -> None:
    """Order later work of `stream` after `event`."""
    if machine().races is not None:
        machine().races.order(stream, event.epochs)


def waited_for(event) -> None:
    """Note that this thread knows that `event` has happened."""
    if machine().races is not None and event.epochs:
        machine().races.wait(event.epochs)


def _place() -> tuple[str, int]:
    """Return the file and the line, outside of this folder, that called."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(HERE):
        if "/test_" in frame.f_code.co_filename:
            break
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
