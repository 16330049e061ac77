"""One attempt of a case: start the job, inject the faults at their moments, wait for the end."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.tools.chaos import disks, jobs
from hpctrain.tools.chaos.case import Case, FailingFile, Fault, FullDisk
from hpctrain.tools.chaos.jobs import Order, Place
from hpctrain.tools.chaos.moments import Disturbance
from hpctrain.tools.chaos.scope import Scope, clear, ended, kill_all

POLL_S = 0.002
GRACE_S = 20.0  #: for processes to end after their launcher: it may have been killed


@dataclass
class Attempt:
    """How an attempt ended, and what it left behind."""

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
    """Train under `faults` and return how that ended; afterwards nothing of it runs."""
    start_s, wall_s = time.monotonic(), time.time()
    with _disk(faults, place, log) as (variables, report), open(log, "w") as stderr:
        process = subprocess.Popen(
            jobs.command(case, place, order),
            env={**jobs.variables(place), **scope.variables(), **variables}, cwd=place.home,
            stdin=subprocess.DEVNULL, stdout=log.with_suffix(".stdout").open("w"), stderr=stderr,
            start_new_session=True,
        )  # fmt: skip
        try:
            fired = _watch(process, Disturbance(case, place, process, wall_s), faults)
            code = process.poll()
            remaining, lingered_s = ended(scope, GRACE_S) if code is not None else ({}, 0.0)
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
def _disk(faults: list[Fault], place: Place, log: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """Yield variables under which the job meets the faults of its disk, and a file that reports."""
    report, variables = log.with_suffix(".fired"), dict[str, str]()
    for fault in faults:
        if isinstance(fault, FullDisk):
            disks.resize(place.disk, fault.kib)
        elif isinstance(fault, FailingFile):  # of several the last one
            variables = disks.environment(fault, disks.build(place.work), place.run, report)
    yield variables, report
    if any(isinstance(fault, FullDisk) for fault in faults):
        disks.resize(place.disk)


def _watch(process: subprocess.Popen[bytes], disturbance: Disturbance, faults: list[Fault]) -> bool:
    """Wait for the end, until the limit of an attempt; return whether a fault took place."""
    deadline_s = time.monotonic() + disturbance.case.limit_s
    waiting = disturbance.schedule(faults)
    while process.poll() is None and time.monotonic() < deadline_s:
        waiting = [moment for moment in waiting if next(moment, moment) is None]
        time.sleep(POLL_S)
    return bool(disturbance.fired_s)
