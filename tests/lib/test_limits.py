"""A row that hangs ends alone and names its threads; a row on a slow machine goes on."""

from __future__ import annotations

import os
import re
import threading

import limits
import pytest
from planted import run_rows

PLUGIN = """
import limits
limits.GRACE_S = 1.0

def pytest_configure(config):
    config.addinivalue_line("markers", "timeout(seconds)")
    config.pluginmanager.register(limits.Limits())
"""
HEAD = """
import ctypes, queue, subprocess, threading, time
import pytest
from hpctrain.transport.threads.ranks import run_ranks

def wait_for_ever(link):
    threading.Event().wait()

@pytest.fixture
def stuck():
    yield
    threading.Event().wait()

def block_in_c(library=ctypes.CDLL):
    mutex = ctypes.create_string_buffer(64)
    lock = library(None).pthread_mutex_lock
    lock(mutex), lock(mutex)

"""
#: row: its body, and the words of its failure
HANGS = {
    "lock": ("threading.Lock().acquire(), threading.Event().wait()", r"thread 'MainThread'"),
    "queue": ("queue.SimpleQueue().get()", r"in test_queue"),
    "sleep": ("time.sleep(1000)", r"in test_sleep"),
    "loop": ("while True: pass", r"in test_loop"),
    "process": ("subprocess.run(['sleep', '1000'])", r"in test_process"),
    "ranks": (
        "run_ranks(3, wait_for_ever)",
        r"thread 'Thread-\d+ \(run_rank\)'(.|\n)*wait_for_ever",
    ),
    "teardown": ("pass", r"in stuck"),
}


def row(name: str, body: str) -> str:
    fixture = "stuck" if name == "teardown" else ""
    return f"@pytest.mark.timeout(0.6)\ndef test_{name}({fixture}):\n    {body}\n\n"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Run the rows that hang, each followed by a row that does not, in one process."""
    rows = [row(name, body) + row(f"after_{name}", "pass") for name, (body, _) in HANGS.items()]
    return run_rows(tmp_path_factory.mktemp("rows"), PLUGIN, HEAD + "".join(rows)).stdout


@pytest.mark.processes
@pytest.mark.either
@pytest.mark.parametrize("name", HANGS)
def test_a_row_that_hangs_names_its_threads(report, name):
    begin = rf"^test_rows.py::test_{name} has not ended within 0.6 s at the pace of this machine"
    assert re.search(rf"{begin}(.|\n)*?{HANGS[name][1]}", report, re.M), report


@pytest.mark.processes
@pytest.mark.either
def test_the_others_go_on(report):
    assert re.findall(r"^(?:FAILED|ERROR) test_rows.py::test_(\w+)", report, re.M) == [
        *(name for name in HANGS if name != "teardown"), "teardown",
    ]  # fmt: skip
    assert f"{len(HANGS) - 1} failed, {len(HANGS) + 1} passed, 1 error" in report, report


@pytest.mark.processes
@pytest.mark.either
def test_a_row_that_is_blocked_in_c_ends_the_process_by_name(tmp_path):
    rows = row("blocked", "block_in_c()") + row("after", "pass")
    ended = run_rows(tmp_path, PLUGIN, HEAD + rows)
    assert ended.returncode == 1
    assert "test_rows.py::test_blocked has not ended within 1 s" in ended.stdout, ended.stdout
    assert "in block_in_c" in ended.stdout
    assert "it cannot be interrupted: ending all rows" in ended.stdout


@pytest.mark.processes
@pytest.mark.either
def test_a_row_that_keeps_the_interpreter_ends_the_process_by_name(tmp_path):
    """No thread of Python can end it."""
    body = "block_in_c(ctypes.PyDLL)"
    plugin = PLUGIN.replace("limits.GRACE_S = 1.0", "limits.LAST_S = 3.0")
    ended = run_rows(tmp_path, plugin, HEAD + row("keeper", body) + row("after", "pass"))
    assert ended.returncode == 1
    assert re.search(r"Timeout .*(.|\n)*in block_in_c\n(.|\n)* in test_keeper", ended.stdout)


ON_MPI = """
from mpi4py import MPI
limits.Limits.__init__.__defaults__ = (lambda: MPI.COMM_WORLD.Abort(1),)
"""


@pytest.mark.processes
def test_a_rank_that_waits_inside_mpi_ends_the_job_by_name(tmp_path):
    """No signal ends its wait: with the row that it is in, the job ends on all ranks."""
    body = "MPI.COMM_WORLD.rank == 0 or MPI.COMM_WORLD.Recv(bytearray(8), 0)"
    rows = "from mpi4py import MPI\n" + HEAD + row("rank", body) + row("end", "MPI.Finalize()")
    ended = run_rows(tmp_path, PLUGIN + ON_MPI, rows, ranks=2)
    assert ended.returncode != 0
    assert "test_rows.py::test_rank has not ended within 0.6 s" in ended.stdout, ended.stdout
    assert "in test_rank" in ended.stdout


#: milliseconds on a core and in the queue, per thread; wall time per second of work
PACES = {
    "idle machine": ([(200, 0), (3, 0)], 1),
    "blocked": ([(0, 0), (1, 0)], 1),
    "blocked, between others": ([(0, 0)], 1),
    "eight jobs on a core": ([(25, 175)], 8),
    "two threads, two jobs": ([(100, 100), (50, 50)], 2),
    "no core at all": ([(0, 250)], limits.MAX_SLOWNESS),
}


@pytest.mark.parametrize("name", PACES)
def test_the_pace_is_the_share_of_the_time_wanted(name):
    threads, expected = PACES[name]
    before = {("7", str(i)): (10**9, 10**8) for i in range(len(threads))}
    now = {
        ("7", str(i)): (10**9 + running * 10**6, 10**8 + queued * 10**6)
        for i, (running, queued) in enumerate(threads)
    }
    other = {("7", "new"): (10**12, 10**12)}  # a thread that has just begun
    assert limits.slowness(before, now | other) == expected
    assert limits.slowness(before, {}) == 1


@pytest.mark.processes
@pytest.mark.either
def test_threads_and_processes_are_counted(start):
    """The shares are those of all threads of this process, and of its children."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    job = start("-c", "import time; time.sleep(100)")
    counted = limits.shares()
    end.set()
    thread.join()
    assert ("self", str(thread.native_id)) in counted
    assert ("self", str(os.getpid())) in counted
    assert (str(job.process.pid), str(job.process.pid)) in counted
