"""The watch: a thread that writes heartbeats and detects calls that wait too long."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from time import time as clock

from hpctrain.watch.ended import EndedRanks
from hpctrain.watch.inside import LastingCalls
from hpctrain.watch.record import Snapshot, WatchRecord, read_record, record_path
from hpctrain.watch.report import interval_s, make_report

log = logging.getLogger(__name__)


class Watch:
    """A daemon thread that beats, and calls `on_hang(report)` once when a call waits too long.

    The limit is `timeout_s`, times `first_step_factor` in the first step (imports, compilers).
    Without a `directory` it can report the ranks of its node alone.
    """

    def __init__(
        self,
        record: WatchRecord,
        directory: Path | None,
        timeout_s: float,
        on_hang: Callable[[str], None],
        first_step_factor: float = 10,
    ) -> None:
        self._record, self._directory, self._on_hang = record, directory, on_hang
        self._timeout_s, self._first_step_factor = timeout_s, first_step_factor
        self._awake_s, self._reported = 0.0, False
        self._first_observed: dict[tuple[str, float], float] = {}
        self._lasting_calls, self._ended_ranks = LastingCalls(), EndedRanks()
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpctrain-watch", daemon=True)
        self._thread.start()

    def stop(self, limit_s: float = 5.0) -> None:
        """End the thread; wait for it `limit_s` at most."""
        self._stop_event.set()
        if self._thread is not threading.current_thread():
            self._thread.join(limit_s)

    def _run(self) -> None:
        beat_s, previous_s = interval_s(self._timeout_s), time.monotonic()
        while not self._stop_event.wait(beat_s):
            # Only time that this process was awake counts: a job that its scheduler stopped for an
            # hour, or whose wall clock was set, must not wake up hung.
            elapsed_s, previous_s = time.monotonic() - previous_s, time.monotonic()
            self._awake_s += min(elapsed_s, 2 * beat_s)
            self._lasting_calls.scan()
            self._record.write_heartbeat()
            self._check_waits()
            self._check_ended_ranks()

    def _check_waits(self) -> None:
        wait_keys = [(call.thread, call.start_s) for call in self._record.snapshot().waiting_calls]
        self._first_observed = {
            key: self._first_observed.get(key, self._awake_s) for key in wait_keys
        }
        waited_s = self._awake_s - min(self._first_observed.values(), default=self._awake_s)
        factor = self._first_step_factor if self._record.in_first_step else 1
        if waited_s > self._timeout_s * factor and not self._reported:
            self._reported = True
            snapshots, has_folder = self._collect_snapshots(), self._directory is not None
            self._on_hang(make_report(snapshots, clock(), self._timeout_s, has_folder))

    def _check_ended_ranks(self) -> None:
        if self._directory is None and not self._reported:
            snapshots = self._record.node_snapshots()
            report = self._ended_ranks.check(snapshots, self._record.rank, self._awake_s)
            if report and len(snapshots) == self._record.size:
                self._reported = True
                self._on_hang(report)
            elif report:  # ranks of other nodes may still compute, and let the call end
                log.warning("%s", report)

    def _collect_snapshots(self) -> list[Snapshot]:
        if self._directory is None:
            return self._record.node_snapshots()
        snapshots = []
        for rank in range(self._record.size):
            with contextlib.suppress(OSError, ValueError):
                snapshots.append(read_record(record_path(self._directory, rank)))
        return snapshots
