"""Jobs whose ranks benchmarks/survival.py kills, and what their events tell."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lib.survival_rank import CONTINUED, EVENT, FOLDER, LOST, REGROUPED, STEP

EVENTS = np.dtype([("kind", "<i8"), ("at_s", "<f8"), ("step", "<i8")])
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
POLL_S = 0.01


STEP_MS = 10
RANKS = 4
#: arguments of a training of endless length: no evaluation, a row of metrics in 10 s
TRAIN = [
    "train", "digits", "--set", "run.epochs=1000000", "--set", "run.evaluate_steps=10000000",
    "--set", "run.interval_steps=1000", "--set", "checkpoint.every_epochs=1000000",
    "--set", f"faults.step_ms={STEP_MS}",
]  # fmt: skip


def settings(*pairs: str) -> list[str]:
    """Return KEY=VALUE pairs as arguments."""
    return [word for pair in pairs for word in ("--set", pair)]


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def mpirun(ranks: int, elastic: bool) -> list[str]:
    """Return the start of the command of a job, with ULFM where it is `elastic`."""
    command = [str(Path(sys.executable).with_name("mpirun"))]
    return [*command, *(["--with-ft", "ulfm"] if elastic else []), "-n", str(ranks)]


class Kill(NamedTuple):
    """A SIGKILL, by the clock of the process that sent it."""

    at_s: float
    pid: int
    number: int  #: of the rank in its job


class Job:
    """A job of `hpctrain`, or of bare MPI, whose processes log their events to a folder."""

    def __init__(
        self, arguments: Sequence[str], ranks: int, spares: int = 0, elastic: bool = True,
        min_ranks: int = 1,
    ):  # fmt: skip
        self.folder = Path(tempfile.mkdtemp(prefix="survival-"))
        self.events_folder = self.folder / "events"
        self.events_folder.mkdir()
        self.kills: list[Kill] = []
        self._read: dict[int, tuple[int, list[np.ndarray]]] = {}
        variables = {
            FOLDER: str(self.events_folder),
            "HPCTRAIN_SPARES": str(spares),
            "HPCTRAIN_MIN_RANKS": str(min_ranks),
        }
        rank_program = [sys.executable, str(Path(__file__).with_name("survival_rank.py"))]
        command = [*mpirun(ranks + spares, elastic), *rank_program, *arguments]
        self.output = (self.folder / "output").open("wb")
        self.process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=self.output,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        for pid in self.events():  # those that a launcher has left behind
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.output.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def events(self) -> dict[int, np.ndarray]:
        """Return the events of each process of this job by its id."""
        for name in os.listdir(self.events_folder):
            offset, parts = self._read.get(int(name), (0, []))
            with (self.events_folder / name).open("rb") as file:
                file.seek(offset)
                data = file.read()
            whole = len(data) // EVENT.size * EVENT.size
            if whole:
                parts.append(np.frombuffer(data[:whole], EVENTS))
            self._read[int(name)] = offset + whole, parts
        return {pid: np.concatenate(parts) for pid, (_, parts) in self._read.items() if parts}

    def live(self) -> dict[int, np.ndarray]:
        """Return the events of the processes that live."""
        killed = {kill.pid for kill in self.kills}
        return {pid: e for pid, e in self.events().items() if pid not in killed and is_alive(pid)}

    def members(self) -> list[int]:
        """Return the live processes that have done a step: spares have not."""
        return [pid for pid, events in self.live().items() if (events["kind"] == STEP).any()]

    def spares(self) -> list[int]:
        """Return the live processes that have done no step."""
        return sorted(set(self.live()) - set(self.members()))

    def await_that(self, condition: Callable[[], bool], timeout_s: float = 120) -> bool:
        """Return whether `condition` became true before the job ended."""
        end_s = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > end_s:
                raise TimeoutError(f"no progress of the job in {timeout_s} s:\n{self.tail()}")
            time.sleep(POLL_S)
        return True

    def await_steps(self, members: int, steps: int, timeout_s: float = 120) -> bool:
        """Return whether `members` processes did `steps` steps after the last kill."""
        since_s = self.kills[-1].at_s if self.kills else 0.0

        def have_done() -> bool:
            live = self.live().values()
            return sum(len(steps_after(e, since_s)) >= steps for e in live) >= members

        return self.await_that(have_done, timeout_s)

    def tail(self) -> str:
        """Return the end of what the ranks have printed."""
        return (self.folder / "output").read_text(errors="replace")[-3000:]

    def kill(self, chance: random.Random) -> Kill:
        """Kill any of the members, or of all processes before the first step."""
        pid = chance.choice(sorted(self.members() or self.live()))
        number = int(self.events()[pid]["step"][0])
        kill = Kill(time.monotonic(), pid, number)
        os.kill(pid, signal.SIGKILL)
        self.kills.append(kill)
        return kill

    def stop(self, timeout_s: float = 120) -> None:
        """Ask the ranks to stop: they make a row, a checkpoint and the summary."""
        os.kill(self.members()[0], signal.SIGUSR1)
        self.process.wait(timeout_s)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def share_of_a_core(pids: Sequence[int], seconds: float) -> list[float]:
    """Return the share of a core that each process uses for some `seconds`."""
    before = [cpu_s(pid) for pid in pids]
    time.sleep(seconds)
    return [(cpu_s(pid) - s) / seconds for pid, s in zip(pids, before, strict=True)]


def steps_after(events: np.ndarray, at_s: float) -> np.ndarray:
    """Return the steps that a process has done since it went on after a loss at `at_s`."""
    if at_s:
        continued = np.flatnonzero((events["kind"] == CONTINUED) & (events["at_s"] > at_s))
        events = events[continued[0] :] if len(continued) else events[:0]
    return events[events["kind"] == STEP]


def first_after(events: np.ndarray, kind: int, at_s: float) -> float | None:
    times = events["at_s"][(events["kind"] == kind) & (events["at_s"] > at_s)]
    return float(times[0]) if len(times) else None


def describe_kill(job: Job, kill: Kill) -> dict[str, Any]:
    """Return the seconds from a kill to each part of the recovery of the survivors.

    `next_step_s`: until the last of the survivors had completed a step after it.
    """
    survivors = [
        events for pid, events in job.events().items()
        if pid != kill.pid and len(steps_after(events, kill.at_s))
        and events["at_s"][events["kind"] == STEP][0] < kill.at_s
    ]  # fmt: skip

    def seconds(kind: int) -> float:
        times = [first_after(events, kind, kill.at_s) for events in survivors]
        return max(t for t in times if t is not None) - kill.at_s

    next_steps = [float(steps_after(e, kill.at_s)["at_s"][0]) - kill.at_s for e in survivors]
    return {
        "rank": kill.number, "survivors": len(survivors), "noticed_s": seconds(LOST),
        "regrouped_s": seconds(REGROUPED), "continued_s": seconds(CONTINUED),
        "next_step_s": max(next_steps), "first_next_step_s": min(next_steps),
    }  # fmt: skip


def progress(events: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return times and steps at which a step was done that no process had done before."""
    steps = np.sort(np.concatenate([e[e["kind"] == STEP] for e in events]), order="at_s")
    is_new = np.diff(np.maximum.accumulate(steps["step"]), prepend=0) > 0
    return steps["at_s"][is_new], steps["step"][is_new]
