"""The end of an elastic job by the marks of its ranks, where its mpiexec knows less."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hpctrain.cluster import rank_states
from hpctrain.core import rank_marks
from hpctrain.core.rank_marks import ABORTS, ENDED, FINISHES, HAS_MPI, LOSES, STARTS_MPI

KILLED, SEGFAULT = -signal.SIGKILL, -signal.SIGSEGV


def states_after(*events, clock=lambda: 0.0):
    states = rank_states.RankStates(1 + max((rank for rank, *_ in events), default=0), clock)
    for rank, event, value in events:
        states.feed(rank_marks.MARK.format(rank, event, value).encode())
    return states


def all_with_mpi(*events, ranks=3):
    begin = [(r, event, 0) for event in (STARTS_MPI, HAS_MPI) for r in range(ranks)]
    return [*begin, *events]


def finish(*ranks):
    return [(rank, FINISHES, 0) for rank in ranks]


def ends(*codes):
    return [(rank, ENDED, code) for rank, code in enumerate(codes)]


# events, the code of mpiexec, the code of the job
CODES = {
    "all killed before MPI": (ends(KILLED, KILLED), 0, 137),
    "all killed, the first one counts": (ends(SEGFAULT, KILLED), 0, 139),
    "wrappers killed with their ranks": ([], 0, 1),
    "all killed in a run": (all_with_mpi(*ends(KILLED, KILLED, KILLED)), 0, 137),
    "survivors": (all_with_mpi(*finish(0, 2), *ends(0, KILLED, 0)), 0, 0),
    "survivors of a rank that left": (all_with_mpi(*finish(0, 2), *ends(0, 3, 0)), 0, 0),
    "all leave without a word": (all_with_mpi(*ends(0, 0, 0)), 0, 1),
    "all leave before MPI_Init has ended": ([(0, STARTS_MPI, 0), *ends(0)], 0, 1),
    "survivors of a program with its own MPI": (ends(0, KILLED, 0), 0, 0),
    "an error of a rank without MPI": (ends(0, 3, KILLED), 0, 3),
    "survivors that abort": (all_with_mpi((0, ABORTS, 5), *ends(KILLED, KILLED, KILLED)), 0, 5),
    "mpiexec knows": (ends(0, 3), 4, 4),
}


@pytest.mark.parametrize("name", CODES)
def test_codes(name):
    events, launcher_code, expected = CODES[name]
    assert states_after(*events).exit_code(launcher_code, was_ended=False)[0] == expected


# events, whether mpiexec or ranks wait for one that was lost, the code of the job if so
FAULTS = {
    "lost in MPI_Init": ([(0, STARTS_MPI, 0), (1, STARTS_MPI, 0), (1, ENDED, KILLED)], 137),
    "lost before": ([(1, ENDED, KILLED), (0, STARTS_MPI, 0)], 137),
    "refused alone": ([(1, ENDED, 2), (0, STARTS_MPI, 0)], 2),
    "gone without a word": ([(1, ENDED, 0), (0, STARTS_MPI, 0)], 1),
    "stopped before it": ([(1, STARTS_MPI, 0), (1, ENDED, 86)], 86),
    "nobody waits": ([(0, STARTS_MPI, 0), (1, ENDED, KILLED), (0, ENDED, 86)], None),
    "no MPI": ([(1, ENDED, KILLED)], None),
    "lost after": ([*all_with_mpi(ranks=2), (1, ENDED, KILLED)], None),
    "mpiexec": (all_with_mpi((0, LOSES, 2), *finish(0, 1), *ends(0, 0)), 0),
    "mpiexec after an error": (all_with_mpi((0, LOSES, 2), *ends(3, KILLED)), 3),
    "a rank that computes": (all_with_mpi((0, LOSES, 2), *finish(0), *ends(0)), None),
    "no lost host": (all_with_mpi(*finish(0, 1), *ends(0, 0)), None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_waits_for_a_lost_rank(name):
    events, code = FAULTS[name]
    now = [0.0]
    states = states_after(*events, clock=lambda: now[0])
    assert not states.find_fault()
    now[0] = rank_states.GRACE_S
    assert bool(states.find_fault()) == (code is not None)
    if code is not None:
        assert states.exit_code(KILLED, was_ended=True)[0] == code


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_marks_are_taken_out_of_the_output(chunk):
    states = rank_states.RankStates(12)
    data = b"".join(
        [b"a\x1eb ", *(rank_marks.MARK.format(r, ENDED, -9).encode() for r in (0, 11)), b"c\n\x1e"]
    )
    pieces = [data[at : at + chunk] for at in range(0, len(data), chunk)]
    assert b"".join(map(states.feed, pieces)) + states.end() == b"a\x1eb c\n\x1e"
    assert states.exit_code(0, was_ended=False)[1].count("SIGKILL") == 2


LEAVE = "import os, signal, sys; os.kill(os.getpid(), -{0}) if {0} < 0 else sys.exit({0})"


@pytest.mark.parametrize("code", [0, 3, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGTERM])
def test_a_wrapper_marks_and_repeats_the_end_of_its_rank(code):
    line = rank_states.command([sys.executable, "-c", LEAVE.format(code)])
    own = os.environ | {rank_marks.RANK_VARIABLES[0]: "4"}
    ended = subprocess.run(line, stderr=subprocess.PIPE, env=own)
    mark = rank_marks.MARK.format(4, ENDED, code).encode()
    assert (ended.returncode, ended.stderr) == (code, mark)


FORWARDED = """
import signal, sys, time
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
print("up", flush=True)
while not got:
    time.sleep(0.01)
sys.exit(7)
"""


def test_a_wrapper_leaves_signals_of_its_group_to_the_rank():
    line = rank_states.command([sys.executable, "-c", FORWARDED])
    with subprocess.Popen(line, stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGUSR1)
        assert process.wait() == 7


def test_a_rank_dies_with_its_wrapper():
    text = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    line = rank_states.command([sys.executable, "-c", text])
    with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.kill()
        assert process.stdout.read() == b""  # nobody has it open any more


def test_marks_are_written_to_the_launcher_alone(tmp_path, monkeypatch):
    """A program may have closed its descriptor, and opened another file."""
    with open(tmp_path / "file", "w") as file:
        monkeypatch.setenv(rank_marks.VARIABLE, f"{file.fileno()} 1")
        rank_marks.write_mark(HAS_MPI)
        monkeypatch.delenv(rank_marks.VARIABLE)
        rank_marks.write_mark(HAS_MPI)
    assert (tmp_path / "file").read_text() == ""
