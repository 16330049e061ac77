"""Stopped ranks of a node: which are killed, by whom, and which must never be."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from limits import clock

from hpctrain.watch import RECORD_BYTES, WatchRecord
from hpctrain.watch.liveness import processes as processes_module
from hpctrain.watch.liveness.observer import LivenessObserver
from hpctrain.watch.liveness.processes import (
    ProcessIdentity,
    ProcessState,
    kill,
    own_identity,
    read_state,
)
from hpctrain.watch.liveness.stopped_ranks import StepTimes, StoppedRanks

LIMIT_S, LOOK_S = 2.0, 0.2
RUNS, SLEEPS, STOPPED = ProcessState("R", 5, False), ProcessState("S", 5, False), "T"


def identity(rank: int, namespace: str = "pid:[1]") -> ProcessIdentity:
    return ProcessIdentity(1000 + rank, 7, namespace)


class Node:
    """Ranks whose heartbeats and states a test sets; `run` is the time one of them observes."""

    def __init__(self, ranks: int = 4, observer: int = 0, **namespaces: str) -> None:
        self.states: dict[int, ProcessState | None] = dict.fromkeys(range(ranks), RUNS)
        self.heartbeats = dict.fromkeys(range(ranks), 0.0)
        self.silent: set[int] = set()
        processes = {r: identity(r, namespaces.get(f"rank{r}", "pid:[1]")) for r in range(ranks)}
        self.stopped_ranks = StoppedRanks(observer, processes, self.read)
        self.now_s = 0.0

    def read(self, process: ProcessIdentity) -> ProcessState | None:
        return self.states[process.pid - 1000]

    def stop(self, *ranks: int, letter: str = STOPPED, has_tracer: bool = False) -> None:
        for rank in ranks:
            self.silent.add(rank)
            self.states[rank] = ProcessState(letter, 5, has_tracer)

    def go_on(self, *ranks: int) -> None:
        for rank in ranks:
            self.silent.discard(rank)
            self.states[rank] = RUNS

    def run(self, seconds: float, limit_s: float = LIMIT_S) -> list:
        verdicts = []
        for _ in range(round(seconds / LOOK_S)):
            self.now_s += LOOK_S
            for rank in self.heartbeats.keys() - self.silent:
                self.heartbeats[rank] = float(int(self.now_s))
            verdicts += self.stopped_ranks.observe(self.heartbeats, self.now_s, limit_s)
        return verdicts


def test_a_stopped_rank_is_killed_once_after_the_limit():
    node = Node()
    assert node.run(5) == []
    node.stop(2)
    assert node.run(LIMIT_S - 1) == []
    (verdict,) = node.run(3)
    assert (verdict.rank, verdict.process, verdict.outlives_kill) == (2, identity(2), False)
    assert "state T, stopped by a signal" in str(verdict) and "limit 2.0 s" in str(verdict)
    node.states[2] = None
    assert node.run(20) == []


def test_only_the_lowest_rank_alive_kills():
    by_lowest, by_other, after_lowest = Node(observer=0), Node(observer=1), Node(observer=1)
    for node in (by_lowest, by_other, after_lowest):
        node.run(3)
        node.stop(2)
    after_lowest.stop(0)
    assert [verdict.rank for verdict in by_lowest.run(4)] == [2]
    assert by_other.run(4) == []
    assert [verdict.rank for verdict in after_lowest.run(4)] == [0, 2]


@pytest.mark.parametrize("state", [RUNS, SLEEPS, ProcessState("t", 5, True), None])
def test_silence_alone_kills_nobody(state):
    node = Node()
    node.run(3)
    node.silent.add(2)
    node.states[2] = state
    assert node.run(60) == []


@pytest.mark.parametrize("letter", ["T", "D"])
def test_a_debugger_kills_nobody(letter):
    node = Node()
    node.run(3)
    node.stop(2, letter=letter, has_tracer=True)
    assert node.run(60) == []


def test_a_rank_that_is_stopped_after_a_long_computation_has_the_whole_limit():
    node = Node()
    node.run(3)
    node.silent.add(2)
    node.run(10)
    node.stop(2)
    assert node.run(LIMIT_S) == []
    assert [verdict.rank for verdict in node.run(1)] == [2]


def test_a_rank_stopped_for_less_than_the_limit_goes_on():
    node = Node()
    for _ in range(5):
        node.run(3)
        node.stop(1, 2)
        assert node.run(LIMIT_S - 0.4) == []
        node.go_on(1, 2)
    assert node.run(10) == []


def test_a_rank_blocked_in_the_kernel_has_more_time():
    node = Node()
    node.run(3)
    node.stop(2, letter="D")
    assert node.run(10 * LIMIT_S - 1) == []
    (verdict,) = node.run(2.4)
    assert "blocked in the kernel" in str(verdict)


def test_a_rank_that_reads_files_goes_on():
    node = Node()
    node.run(3)
    node.stop(2, letter="D")
    for ticks in range(60):
        node.states[2] = ProcessState("D", ticks, False)
        assert node.run(1) == []


def test_a_rank_that_outlives_kill_is_reported_once():
    node = Node()
    node.run(3)
    node.stop(2)
    killed, outlived = node.run(20)  # and not again
    assert (killed.outlives_kill, outlived.outlives_kill, outlived.rank) == (False, True, 2)
    assert "SIGKILL has not ended it" in str(outlived)


def test_a_zombie_is_no_rank_that_outlives_kill():
    node = Node()
    node.run(3)
    node.stop(2)
    assert len(node.run(3.4)) == 1
    node.states[2] = ProcessState("Z", 5, False)
    assert node.run(20) == []


def test_ranks_in_other_namespaces_are_not_judged():
    node = Node(rank2="pid:[2]")
    node.run(3)
    node.stop(2)
    assert node.run(60) == []


def test_a_longer_limit_waits_longer():
    node = Node()
    node.run(3)
    node.stop(2)
    assert node.run(29, limit_s=30) == []
    assert [verdict.rank for verdict in node.run(12, limit_s=30)] == [2]


@pytest.mark.parametrize("step_s, limit_s", [(0.01, 2.0), (0.2, 2.0), (1.0, 10.0), (30.0, 300.0)])
def test_the_limit_follows_the_median_step(step_s, limit_s):
    times, step = StepTimes(), 0
    assert times.limit_s() == 2.0
    for look in range(3000):
        step = int(look * LOOK_S / step_s) if look != 1500 else step
        times.observe(step, look * LOOK_S)
    assert times.limit_s() == pytest.approx(limit_s, rel=0.03)


def test_a_step_back_is_no_step_time():
    times = StepTimes()
    for step, awake_s in [(5, 0.0), (6, 1.0), (0, 2.0), (1, 3.0)]:
        times.observe(step, awake_s)
    assert times.limit_s() == pytest.approx(10.0)


# Real processes


SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
#: Writes heartbeats as the watch does, and computes in C with the interpreter's lock meanwhile.
HOLDER = """
import ctypes, os, sys, time
print("up", flush=True)
libc = ctypes.PyDLL(None)
libc.usleep(600_000_000)
"""


@pytest.fixture
def spawn():
    children = []

    def spawn(command):
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        children.append(child)
        assert child.stdout.readline() == b"up\n"
        return child

    yield spawn
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def identity_of(child: subprocess.Popen) -> ProcessIdentity:
    fields = processes_module._read_stat(child.pid)
    start_ticks = int(fields[processes_module._START_TICKS])
    return ProcessIdentity(child.pid, start_ticks, own_identity().namespace)


def await_state(process: ProcessIdentity, letter: str) -> ProcessState:
    deadline = clock() + 30
    while (state := read_state(process)) is None or state.letter != letter:
        assert clock() < deadline, state
        time.sleep(0.01)
    return state


def test_identity_survives_a_message():
    assert ProcessIdentity.parse(str(own_identity())) == own_identity()
    assert read_state(own_identity()).letter in "RS"


def test_states_of_a_real_process(spawn):
    child = spawn(SLEEPER)
    process = identity_of(child)
    await_state(process, "S")
    os.kill(child.pid, signal.SIGSTOP)
    assert await_state(process, "T").shows_stop(None)
    os.kill(child.pid, signal.SIGCONT)
    await_state(process, "S")
    assert kill(process)
    child.wait()
    assert read_state(process) is None
    assert not kill(process)


def test_a_process_with_the_pid_of_an_earlier_one_is_not_killed(spawn):
    child = spawn(SLEEPER)
    earlier = replace(identity_of(child), start_ticks=1)
    assert read_state(earlier) is None
    assert not kill(earlier)
    assert child.poll() is None


class Observed:
    """An observer in this process, rank 0, of real processes whose heartbeats a test writes."""

    def __init__(self, children, limit_s: float = 0.6, step=lambda: 0):
        own = {0: own_identity()}
        processes = own | {r: identity_of(child) for r, child in enumerate(children, start=1)}
        self.records = {r: WatchRecord(r, len(processes)) for r in processes}
        self.lost: list = []
        self.silent: set[int] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat)
        self._thread.start()
        self.observer = LivenessObserver(
            self.heartbeats,
            StoppedRanks(0, processes),
            step,
            lambda rank, reason: self.lost.append((rank, reason)),
            least_limit_s=limit_s,
        )

    def heartbeats(self):
        return {rank: record.snapshot().heartbeat for rank, record in self.records.items()}

    def _beat(self):
        while not self._ended.wait(0.05):
            for rank in self.records.keys() - self.silent:
                self.records[rank].write_heartbeat()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.observer.stop()
        self._ended.set()
        self._thread.join()


@pytest.mark.processes
@pytest.mark.either
def test_a_real_rank_that_is_stopped_is_killed(spawn, caplog):
    child, other = spawn(SLEEPER), spawn(SLEEPER)
    with Observed([child, other]) as observed, caplog.at_level(logging.WARNING):
        os.kill(child.pid, signal.SIGSTOP)
        observed.silent.add(1)
        assert child.wait(60) == -signal.SIGKILL
        time.sleep(1)
        assert other.poll() is None
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and f"rank 1 (pid {child.pid}): no heartbeat for" in lines[0]
    assert observed.lost == []


@pytest.mark.processes
@pytest.mark.either
def test_a_real_rank_that_holds_the_interpreter_lives(spawn):
    child = spawn([sys.executable, "-c", HOLDER])
    with Observed([child], limit_s=0.3) as observed:
        observed.silent.add(1)
        time.sleep(3)
        assert child.poll() is None


JOB = """
import os, sys, time, threading
from functools import partial
from hpctrain.watch import RECORD_BYTES, WatchRecord
from hpctrain.watch.liveness.observer import LivenessObserver
from hpctrain.watch.liveness.processes import ProcessIdentity, own_identity
from hpctrain.watch.liveness.setup import read_heartbeats
from hpctrain.watch.liveness.stopped_ranks import StoppedRanks
import mmap
rank, folder = int(sys.argv[1]), sys.argv[2]
with open(f"{folder}/pages", "r+b") as file:
    pages = memoryview(mmap.mmap(file.fileno(), 3 * RECORD_BYTES))
mine = [pages[r * RECORD_BYTES:(r + 1) * RECORD_BYTES] for r in range(3)]
record = WatchRecord(rank, 3, [mine[rank], *(p for r, p in enumerate(mine) if r != rank)])
with open(f"{folder}/{rank}.tmp", "w") as file:
    file.write(str(own_identity()))
os.rename(f"{folder}/{rank}.tmp", f"{folder}/{rank}")
while not all(os.path.exists(f"{folder}/{r}") for r in range(3)):
    time.sleep(0.01)
processes = {r: ProcessIdentity.parse(open(f"{folder}/{r}").read()) for r in range(3)}
heartbeats = partial(read_heartbeats, record, processes)
observer = LivenessObserver(
    heartbeats, StoppedRanks(rank, processes), lambda: 0, print, least_limit_s=1.0
)
print("up", flush=True)
while True:
    time.sleep(0.05)
    record.write_heartbeat()
"""


@pytest.fixture
def job(spawn, tmp_path):
    """Return three real ranks that observe each other, with a limit of 1 s."""
    (tmp_path / "pages").write_bytes(bytes(3 * RECORD_BYTES))
    script = tmp_path / "job.py"
    script.write_text(JOB)
    commands = [[sys.executable, str(script), str(rank), str(tmp_path)] for rank in range(3)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    for child in children:
        assert child.stdout.readline() == b"up\n"
    yield children
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.sample(1)
@pytest.mark.processes
@pytest.mark.either
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTSTP])
def test_a_job_that_was_suspended_wakes_whole(job, number):
    for first in range(2):
        order = job[first:] + job[:first]
        for child in order:  # they stop, and wake, one after the other
            os.kill(child.pid, number)
            time.sleep(0.05)
        time.sleep(2.2)  # more than two limits
        for child in reversed(order):
            os.kill(child.pid, signal.SIGCONT)
            time.sleep(0.05)
        time.sleep(1)
        assert [child.poll() for child in job] == [None, None, None]


@pytest.mark.sample(1)
@pytest.mark.processes
@pytest.mark.either
@pytest.mark.parametrize("victims", [(0,), (2,), (0, 1)])
def test_the_ranks_left_kill_those_that_are_stopped(job, victims):
    for victim in victims:
        os.kill(job[victim].pid, signal.SIGSTOP)
    for victim in victims:
        assert job[victim].wait(60) == -signal.SIGKILL
    time.sleep(1)
    alive = [rank for rank in range(3) if job[rank].poll() is None]
    assert alive == [rank for rank in range(3) if rank not in victims]
