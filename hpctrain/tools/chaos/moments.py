"""When a signal is due, and which process it hits: read from the records of the watch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain import watch
from hpctrain.tools.chaos import hosts
from hpctrain.tools.chaos.case import Case, Fault, HostFault, Signal
from hpctrain.tools.chaos.jobs import Place
from hpctrain.watch import Snapshot

AGAIN_S = 0.1  #: between two signals of a fault


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
        return signals + [self._host(fault) for fault in faults if isinstance(fault, HostFault)]

    def _signal(self, fault: Signal) -> Iterator[None]:
        yield from self._moment(fault)
        for i in range(fault.times):
            if i:
                yield from _until(time.time() + AGAIN_S)
            self._send(fault)

    def _moment(self, fault: Signal) -> Iterator[None]:
        """Wait for the moment of `fault`."""
        due_s = self.start_s
        if fault.during == "recovery":
            while self.case.is_elastic and not self.fired_s:
                yield
            due_s = self.fired_s[-1] if self.case.is_elastic else self.start_s
        elif fault.step is not None:
            yield from self._step(fault.step)
            due_s = time.time()
        if fault.during == "checkpoint":
            while not _writes_checkpoint(self.place.run):
                yield
            due_s = time.time()
        while fault.target >= 0 and not self._ranks(0):  # their process ids are not known yet
            yield
        yield from _until(due_s + fault.delay_ms / 1000)

    def _host(self, fault: HostFault) -> Iterator[None]:
        yield from self._step(fault.step)
        yield from _until(time.time() + fault.delay_ms / 1000)
        ranks = self._ranks(0)
        if ranks and hosts.disturb(hosts.outer_pid(ranks[fault.target % len(ranks)].pid), fault):
            self.fired_s.append(time.time())

    def _step(self, step: int) -> Iterator[None]:
        while not self._ranks(step):
            yield

    def _ranks(self, step: int) -> list[Snapshot]:
        """Return every rank's record, in order, if all ranks have come to `step`, else nothing.

        In an elastic job only living ranks count: others were lost, and spares may have records.
        """
        snapshots = watch.read_records(self.place.run / "watch")
        # Records of an earlier attempt are left out.
        ordered = [snapshots[rank] for rank in sorted(snapshots)]
        records = [record for record in ordered if record.heartbeat >= self.start_s]
        if self.case.is_elastic:
            records = [record for record in records if _is_alive(record.pid)]
            is_complete = bool(records) and (len(records) >= self.case.ranks or bool(self.fired_s))
            # A spare that sleeps stays at step 0.
            training = [record for record in records if record.step >= step]
            return training if is_complete and len(training) >= min(2, len(records)) else []
        reached = all(record.step >= step for record in records)
        return records if reached and len(records) == self.case.ranks else []

    def _send(self, fault: Signal) -> None:
        number = signal.Signals[fault.signal]
        if fault.target < 0:
            self._note(_sent_to(self.process.pid, number))
            return
        ranks = self._ranks(0)
        victims = [ranks[target % len(ranks)] for target in (fault.target, *fault.others) if ranks]
        for record in {record.pid: record for record in victims}.values():
            self._note(self._reach(record, number))

    def _reach(self, record: Snapshot, number: signal.Signals) -> bool:
        if self.case.launcher == "netlab":
            return _sent_to(hosts.outer_pid(record.pid), number)
        if record.host == socket.gethostname():
            return _sent_to(record.pid, number)
        words = ["srun", "--overlap", "-N1", "-n1", "-w", record.host, "kill", "-s"]
        ended = subprocess.run([*words, number.name.removeprefix("SIG"), str(record.pid)])
        return ended.returncode == 0

    def _note(self, took_place: bool) -> None:
        if took_place:
            self.fired_s.append(time.time())


def _until(due_s: float) -> Iterator[None]:
    while time.time() < due_s:
        yield


def _writes_checkpoint(run: Path) -> bool:
    """Return whether a checkpoint is being written: its folder is not committed yet."""
    try:
        return any(name.endswith(".partial") for name in os.listdir(run / "checkpoints"))
    except OSError:
        return False


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def _sent_to(pid: int, number: signal.Signals) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
