"""A bounded queue of rows, and the daemon thread that hands them to a tracker."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpctrain.core.names import counted
from hpctrain.training.loggers.tracker import Tracker, Values, row_values, rows_after

log = logging.getLogger(__name__)
MOST_ROWS = 1000  #: that wait for the tracker
END_S = 60.0  #: limit of the wait for the tracker, at the end of a training that is done
STOP_S = 5.0  #: at the end of one that was stopped, or that failed: the job may be killed soon
Call = Callable[..., Any]


class Worker:
    """The calls of a tracker, made by a thread one after the other; it survives what they raise."""

    def __init__(self, tracker: Tracker):
        self._tracker, self._is_open = tracker, False
        self._changed = threading.Condition()
        self._calls: deque[tuple[Call | None, tuple[Any, ...]]] = deque()  # None ends the thread
        self.written = 0  #: rows
        self.fault: str | None = None  #: the first

    def run(self) -> None:
        """Make the calls until None; the thread's own function."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls)
                call, arguments = self._calls.popleft()
            if call is None:
                return
            self._guard(call, *arguments)

    def put(self, call: Call | None, *arguments: Any, limit: int | None = None) -> bool:
        """Append a call unless `limit` calls wait; return whether it was."""
        with self._changed:
            if limit is not None and len(self._calls) >= limit:
                return False
            self._calls.append((call, arguments))
            self._changed.notify()
            return True

    def clear(self) -> int:
        """Drop the calls that wait; return the number of rows among them."""
        with self._changed:
            count = sum(call == self.log for call, _ in self._calls)
            self._calls.clear()
            return count

    def note(self, fault: str) -> None:
        """Keep the first fault, and log it at once."""
        if self.fault is None:
            self.fault = fault
            log.warning("logger %s: %s; training goes on", self._tracker.kind, fault)

    def begin(self, step: int, rows: Sequence[Mapping[str, Any]] | None) -> None:
        self._is_open = False
        last_step = self._tracker.begin(step, rows is not None)
        self._is_open = True
        for row in rows_after(last_step, rows or []):
            self._guard(self._tracker.log, row["step"], row_values(row))

    def log(self, step: int, values: Values) -> None:
        if self._is_open:
            self._tracker.log(step, values)
            self.written += 1

    def end(self, summary: Mapping[str, Any]) -> None:
        if self._is_open:
            self._is_open = False
            self._tracker.end(summary)

    def _guard(self, call: Call, *arguments: Any) -> None:
        try:
            call(*arguments)
        except BaseException as error:  # a library may raise anything; training goes on
            self.note(f"{type(error).__name__}: {error}".splitlines()[0])


class Feed:
    """Rows for a tracker, written in their order by a daemon thread.

    No method but `wait` waits: rows that find MOST_ROWS before them are dropped, and counted.
    """

    def __init__(self, tracker: Tracker):
        self.target, self._kind, self._rows = tracker.target, tracker.kind, 0
        self.is_open = True  #: until `finish`
        self._worker = Worker(tracker)
        self._thread = threading.Thread(
            target=self._worker.run, name=f"logger {tracker.kind}", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._worker.put, None)  # the rank that made it may be lost

    def begin(self, step: int, rows: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Go on after `step`; `rows`: the earlier rows, None if the tracker alone has them."""
        if rows is not None:
            self._rows -= self._worker.clear()  # they are among `rows`, or come again
        self._worker.put(self._worker.begin, step, rows)

    def log(self, step: int, values: Values) -> None:
        """Append the numbers of a step."""
        self._rows += 1
        if not self._worker.put(self._worker.log, step, values, limit=MOST_ROWS):
            self._worker.note(f"{MOST_ROWS:,} rows wait, no more are kept")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Append the summary, and the end of the thread."""
        self.is_open = False
        self._worker.put(self._worker.end, summary)
        self._worker.put(None)

    def wait(self, seconds: float) -> dict[str, Any]:
        """Wait for the end of the thread, not longer than `seconds`; count the rows."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._worker.note(f"not done {seconds:.1f} s after the last row")
            self._worker.clear()
            self._worker.put(None)
        dropped = self._rows - self._worker.written
        if dropped:
            rows = counted(self._rows, "row")
            log.warning(
                "logger %s: %d of %s dropped (%s)", self._kind, dropped, rows, self._worker.fault
            )
        return {
            "kind": self._kind,
            "rows": self._rows,
            "dropped": dropped,
            "fault": self._worker.fault,
        }
