"""The watch: a thread that writes heartbeats and detects calls that wait too long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from time import time as clock

from hpctrain.watch.ended import EndedRanks
from hpctrain.watch.inside import LastingCalls
from hpctrain.watch.node_exchange import NodeExchange
from hpctrain.watch.record import WatchRecord
from hpctrain.watch.report import HungReport, interval_s, make_report

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
        on_hang: Callable[[HungReport], None],
        first_step_factor: float = 10,
    ) -> None:
        self._record, self._on_hang = record, on_hang
        self._exchange = None if directory is None else NodeExchange(record, directory)
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
            if self._exchange is not None:
                self._exchange.answer()
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
            self._on_hang(self._make_report())

    def _make_report(self) -> HungReport:
        if self._exchange is None:
            snapshots = self._record.node_snapshots(history=True)
            return make_report(snapshots, clock(), self._timeout_s, has_folder=False)
        snapshots, lost_nodes = self._exchange.collect(self._timeout_s)
        return make_report(snapshots, clock(), self._timeout_s, lost_nodes=lost_nodes)

    def _check_ended_ranks(self) -> None:
        if self._exchange is None and not self._reported:
            snapshots = self._record.node_snapshots()
            report = self._ended_ranks.check(snapshots, self._record.rank, self._awake_s)
            if report and len(snapshots) == self._record.size:
                self._reported = True
                self._on_hang(report)
            elif report:  # ranks of other nodes may still compute, and let the call end
                log.warning("%s", report.text)
