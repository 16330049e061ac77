"""One attempt of a case: start the job, inject the faults at their moments, wait for the end.

A moment is read from the records of the watch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain import watch
from hpctrain.tools.chaos import hosts, jobs
from hpctrain.tools.chaos.case import Case, FailingFile, Fault, FullDisk, HostFault, Signal
from hpctrain.tools.chaos.jobs import Order, Place
from hpctrain.tools.chaos.scope import Scope, clear, command_line, kill_all, wait_for_processes
from hpctrain.watch import Snapshot

POLL_S = 0.002
GRACE_S = 20.0  #: for processes to end after their launcher: it may have been killed
AGAIN_S = 0.1  #: between two signals of a fault


@dataclass
class Attempt:
    """The outcome of an attempt: its end, and the processes and files that it left."""

    code: int | None  #: None: it was still running at the limit
    seconds: float
    fired: bool  #: whether a fault took place
    stderr: str
    processes: dict[int, str] = field(default_factory=dict)
    lingered_s: float = 0.0  #: how long processes outlived their launcher
    shared_memory: list[str] = field(default_factory=list)
    temporary: list[str] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)  #: of links, by each rank that is a thread


def attempt(
    case: Case, place: Place, scope: Scope, order: Order, faults: list[Fault], log: Path
) -> Attempt:
    """Train under `faults` and return the outcome; no process of the job runs afterwards."""
    start_s, wall_s = time.monotonic(), time.time()
    with _prepare_disk(faults, place, log) as (variables, report), open(log, "w") as stderr:
        process = subprocess.Popen(
            jobs.command(case, place, order),
            env={**jobs.variables(place), **scope.variables(), **variables}, cwd=place.home,
            stdin=subprocess.DEVNULL, stdout=log.with_suffix(".stdout").open("w"), stderr=stderr,
            start_new_session=True,
        )  # fmt: skip
        try:
            fired = _wait_for_end(process, Disturbance(case, place, process, wall_s), faults)
            code = process.poll()
            remaining, lingered_s = (
                wait_for_processes(scope, GRACE_S) if code is not None else ({}, 0.0)
            )
            remaining = remaining or (scope.processes() if code is None else {})
            seconds = time.monotonic() - start_s
        finally:
            kill_all(scope)
            process.wait()
    result = Attempt(
        code, seconds, fired or report.exists() or any(isinstance(f, FullDisk) for f in faults),
        log.read_text(errors="replace"), remaining, lingered_s,
        scope.shared_memory(), sorted(os.listdir(place.temporary)),
    )  # fmt: skip
    clear(scope, place.temporary)
    return result


@contextmanager
def _prepare_disk(
    faults: list[Fault], place: Place, log: Path
) -> Iterator[tuple[dict[str, str], Path]]:
    """Yield the variables that inject faults of the disk, and the file that reports them."""
    report, variables = log.with_suffix(".fired"), dict[str, str]()
    for fault in faults:
        if isinstance(fault, FullDisk):
            hosts.resize(place.disk, fault.kib)
        elif isinstance(fault, FailingFile):  # of several the last one
            variables = hosts.environment(fault, hosts.build(place.work), place.run, report)
    yield variables, report
    if any(isinstance(fault, FullDisk) for fault in faults):
        hosts.resize(place.disk)


def _wait_for_end(
    process: subprocess.Popen[bytes], disturbance: Disturbance, faults: list[Fault]
) -> bool:
    """Wait for the end, until the limit of an attempt; return whether a fault took place."""
    deadline_s = time.monotonic() + disturbance.case.limit_s
    waiting = disturbance.schedule(faults)
    while process.poll() is None and time.monotonic() < deadline_s:
        waiting = [moment for moment in waiting if next(moment, moment) is None]
        time.sleep(POLL_S)
    return bool(disturbance.fired_s)


@dataclass
class Disturbance:
    """The signals and host faults of an attempt, each at its moment."""

    case: Case
    place: Place
    process: subprocess.Popen[bytes]
    start_s: float  #: wall-clock seconds
    fired_s: list[float] = field(default_factory=list)  #: moments of the faults that took place

    def schedule(self, faults: list[Fault]) -> list[Iterator[None]]:
        """Return an iterator per fault, to be advanced often; each ends with its fault."""
        signals = [self._signal(fault) for fault in faults if isinstance(fault, Signal)]
        return signals + [
            self._disturb_host(fault) for fault in faults if isinstance(fault, HostFault)
        ]

    def _signal(self, fault: Signal) -> Iterator[None]:
        yield from self._wait_for_moment(fault)
        for i in range(fault.times):
            if i:
                yield from _wait_until(time.time() + AGAIN_S)
            self._send_signal(fault)

    def _wait_for_moment(self, fault: Signal) -> Iterator[None]:
        """Wait for the moment of `fault`."""
        due_s = self.start_s
        if fault.during == "recovery":
            while self.case.is_elastic and not self.fired_s:
                yield
            due_s = self.fired_s[-1] if self.case.is_elastic else self.start_s
        elif fault.step is not None:
            yield from self._wait_for_step(fault.step)
            due_s = time.time()
        if fault.during == "checkpoint":
            # The folder of a checkpoint that is being written is not committed yet.
            while not [*(self.place.run / "checkpoints").glob("*.partial")]:
                yield
            due_s = time.time()
        # The ranks' process ids are not known yet.
        while fault.target >= 0 and not self._rank_records(0):
            yield
        yield from _wait_until(due_s + fault.delay_ms / 1000)

    def _disturb_host(self, fault: HostFault) -> Iterator[None]:
        yield from self._wait_for_step(fault.step)
        yield from _wait_until(time.time() + fault.delay_ms / 1000)
        ranks = self._rank_records(0)
        if ranks and hosts.disturb(hosts.outer_pid(ranks[fault.target % len(ranks)].pid), fault):
            self.fired_s.append(time.time())

    def _wait_for_step(self, step: int) -> Iterator[None]:
        while not self._rank_records(step):
            yield

    def _rank_records(self, step: int) -> list[Snapshot]:
        """Return every rank's record, in order, if all ranks have come to `step`, else nothing.

        In an elastic job only living ranks count: others were lost, and spares may have records.
        """
        snapshots = watch.read_records(self.place.run / "watch")
        # Records of an earlier attempt are left out.
        records_by_rank = [snapshots[rank] for rank in sorted(snapshots)]
        records = [record for record in records_by_rank if record.heartbeat >= self.start_s]
        if self.case.is_elastic:
            records = [record for record in records if command_line(record.pid)]
            is_complete = bool(records) and (len(records) >= self.case.ranks or bool(self.fired_s))
            # A spare that sleeps stays at step 0.
            training = [record for record in records if record.step >= step]
            return training if is_complete and len(training) >= min(2, len(records)) else []
        is_at_step = all(record.step >= step for record in records)
        return records if is_at_step and len(records) == self.case.ranks else []

    def _send_signal(self, fault: Signal) -> None:
        number = signal.Signals[fault.signal]
        if fault.target < 0:
            self._note_fault(_signal_process(self.process.pid, number))
            return
        ranks = self._rank_records(0)
        victims = [ranks[target % len(ranks)] for target in (fault.target, *fault.others) if ranks]
        for record in {record.pid: record for record in victims}.values():
            self._note_fault(self._signal_rank(record, number))

    def _signal_rank(self, record: Snapshot, number: signal.Signals) -> bool:
        if self.case.launcher == "netlab":
            return _signal_process(hosts.outer_pid(record.pid), number)
        if record.host == socket.gethostname():
            return _signal_process(record.pid, number)
        kill_command = ["srun", "--overlap", "-N1", "-n1", "-w", record.host, "kill", "-s"]
        process = subprocess.run([*kill_command, number.name.removeprefix("SIG"), str(record.pid)])
        return process.returncode == 0

    def _note_fault(self, took_place: bool) -> None:
        if took_place:
            self.fired_s.append(time.time())


def _wait_until(due_s: float) -> Iterator[None]:
    while time.time() < due_s:
        yield


def _signal_process(pid: int, number: signal.Signals) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
