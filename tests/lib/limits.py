"""Limits of rows by the pace of the machine: a row that hangs ends alone, and names its threads.

A row has LIMIT_S, or the seconds of its marker `timeout`, of an idle machine. A thread measures how
much slower this machine is for the row's threads and processes: the kernel counts for each thread
the time on a core and the time in the queue for one (/proc/PID/task/TID/schedstat). A row that gets
a core for an eighth of the time that it wants has eight times as long by the clock. A blocked row
wants none and has the limit as it is. Neither depends on the interpreter's lock.

At the limit a signal raises in the main thread, where pytest and the waits of tests are. If the row
has not ended GRACE_S later, it is blocked in C: the process ends, by name. So does a job of MPI,
whose ranks would be out of step. Where the thread itself gets no interpreter for LAST_S, a native
timer ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

LIMIT_S = 120.0
GRACE_S = 30.0
LAST_S = 900.0
ABORT_S = 5.0
TICK_S = 0.25
MAX_SLOWNESS = 50.0
SIGNAL = signal.SIGRTMIN  # SIGALRM and the other names are used by what is tested

#: (process, thread): nanoseconds on a core, and in the queue for one
Shares = dict[tuple[str, str], tuple[int, int]]


def shares(pid: str = "self") -> Shares:
    """Return the times of all threads of a process, and of all processes below it."""
    result: Shares = {}
    with suppress(OSError):  # a thread or a process has ended
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                folder = Path(f"/proc/{pid}/task/{task}")
                running, queued, _ = (folder / "schedstat").read_text().split()
                result[pid, task] = int(running), int(queued)
                for child in (folder / "children").read_text().split():
                    result |= shares(child)
    return result


def slowness(before: Shares, now: Shares) -> float:
    """Return the wall time per second of work between two readings, from 1 to MAX_SLOWNESS."""
    running_ns = queued_ns = 0
    for thread in before.keys() & now.keys():
        running_ns += now[thread][0] - before[thread][0]
        queued_ns += now[thread][1] - before[thread][1]
    if queued_ns <= 0:
        return 1.0
    return min((running_ns + queued_ns) / max(running_ns, 1), MAX_SLOWNESS)


def stacks() -> str:
    """Return the name of each thread of Python, and the calls in which it stands."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own, lines = threading.get_ident(), []
    for ident, frame in sys._current_frames().items():
        if ident != own:
            calls = traceback.format_list(traceback.extract_stack(frame)[-12:])
            lines.append(f"thread {names.get(ident, ident)!r}:\n{''.join(calls)}")
    return "\n".join(lines)


_paced_s: float | None = None  # None: nobody measures the pace


def clock() -> float:
    """Return seconds that pass as slowly as this machine works: for limits of a test's waits."""
    return time.monotonic() if _paced_s is None else _paced_s


class Limits:
    """Ends a row that takes longer than its limit at the pace of the machine."""

    def __init__(self, abort: Callable[[], object] | None = None) -> None:
        """`abort` ends a job of MPI, in place of the row."""
        self._abort = abort
        self._lock = threading.Lock()
        self._row, self._begin_s, self._spent_s, self._limit_s = "", 0.0, 0.0, LIMIT_S
        self._is_over = self._is_interruptible = False
        self._text = ""  # of the exception that the main thread is to raise
        self._stderr = os.dup(2)  # before a test's output is captured
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="limits", daemon=True)

    def pytest_sessionstart(self) -> None:
        signal.signal(SIGNAL, self._raise)
        self._begin_last_limit()  # the first row may keep the interpreter before the first tick
        self._thread.start()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self._stop.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        os.close(self._stderr)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[object]:
        marker = item.get_closest_marker("timeout")
        with self._lock:
            self._row, self._begin_s, self._spent_s = item.nodeid, time.monotonic(), 0.0
            self._limit_s = float(marker.args[0]) if marker else LIMIT_S
            self._is_over, self._text = False, ""
        try:
            return (yield)
        finally:
            with self._lock:
                self._row = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[object]:
        return (yield from self._interruptible())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[object]:
        return (yield from self._interruptible())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[object]:
        return (yield from self._interruptible())

    def _interruptible(self) -> Iterator[object]:
        """Allow the signal to raise: elsewhere it would end pytest itself."""
        self._is_interruptible = True
        try:
            return (yield)
        finally:
            self._is_interruptible = False

    def _raise(self, *_: object) -> None:
        text, self._text = self._text, ""
        if text and self._is_interruptible:
            pytest.fail(text, pytrace=False)

    def _begin_last_limit(self) -> None:
        faulthandler.dump_traceback_later(LAST_S, exit=True, file=self._stderr)

    def _watch(self) -> None:
        global _paced_s
        _paced_s = time.monotonic()
        before, then_s = shares(), time.monotonic()
        while not self._stop.wait(TICK_S):
            self._begin_last_limit()
            now, now_s = shares(), time.monotonic()
            # A tick that took longer belongs to a process that was stopped.
            passed_s = min(now_s - then_s, 4 * TICK_S) / slowness(before, now)
            before, then_s, _paced_s = now, now_s, _paced_s + passed_s
            with self._lock:
                self._spend(passed_s)

    def _spend(self, passed_s: float) -> None:
        """Add to the time of the row, and end it at its limit."""
        self._spent_s += passed_s
        if not self._row:
            return
        if self._spent_s > self._limit_s:
            clock_s = time.monotonic() - self._begin_s
            text = (
                f"{self._row} has not ended within {self._limit_s:g} s at the pace of this machine,"
                f" {clock_s:.0f} s by the clock\n\n{stacks()}"
            )
            if self._abort is not None or self._is_over:
                self._end(text)
            self._is_over, self._text = True, text
            self._spent_s, self._limit_s = 0.0, GRACE_S
        if self._text:  # again, if the signal came between two parts of the row
            signal.pthread_kill(threading.main_thread().ident, SIGNAL)

    def _end(self, text: str) -> None:
        """End the process or the job; its processes would go on."""
        os.write(self._stderr, f"\n{text}\nit cannot be interrupted: ending all rows\n".encode())
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                process.kill()
        if self._abort is not None:
            threading.Thread(target=self._abort, daemon=True).start()
            time.sleep(ABORT_S)
        os._exit(1)
