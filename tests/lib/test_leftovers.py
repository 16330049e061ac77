"""The guard after each test names the things that tests leave, and no others."""

from __future__ import annotations

import re

import pytest
from planted import run_rows

PLUGIN = """
import leftovers
leftovers.WAIT_S = 0.5

def pytest_configure(config):
    config.addinivalue_line("markers", "processes")
    config.pluginmanager.register(leftovers.Guard(on_mpi=False))
"""
HEAD = """
import _thread, mmap, os, subprocess, sys, threading, time
import pytest

things = []

@pytest.fixture(scope="module")
def wide():
    os.environ["WIDE"] = "1"
    things.append(open(__file__))
    process = subprocess.Popen(["sleep", "100"])
    yield
    del os.environ["WIDE"]
    process.kill()
    process.wait()

"""
ORPHAN = "import subprocess; subprocess.Popen(['sleep', '100'], start_new_session=True)"
#: body of a test: the words of the guard, a regular expression
LEFTOVERS = {
    "threading.Thread(target=time.sleep, args=[100], name='late', daemon=True).start()": (
        r"thread 'late', now at .*threading.py:\d+"
    ),
    "threading.Thread(target=lambda: time.sleep(100), daemon=True).start()": (
        r"thread 'Thread-1 .*' of .*test_rows.py:\d+, now at .*test_rows.py:\d+"
    ),
    "things.append(subprocess.Popen(['sleep', '100']))": r"process \d+: sleep 100",
    "things.append(subprocess.Popen(['true']))": r"process \d+: true",
    f"subprocess.run([sys.executable, '-c', {ORPHAN!r}])": r"process \d+: sleep 100",
    "things.extend([open(__file__), open(__file__)])": r"2 descriptors of .*test_rows.py",
    "things.extend(os.pipe())": r"2 descriptors of pipe:\[\d+\]",
    "os.close(os.open('/dev/shm/hpctrain-planted', os.O_CREAT))": r"file /dev/shm/hpctrain-planted",
    (
        "fd = os.memfd_create('hpctrain'); os.ftruncate(fd, 9); memory = mmap.mmap(fd, 9); "
        "memory[0] = 1; os.close(fd); things.append(memory)"
    ): r"1 descriptor of /memfd:hpctrain \(deleted\), 1 mapping of /memfd:hpctrain .*",
    "os.environ['PLANTED'] = '1'": r"variable PLANTED=b'1'",
    "os.environ['HOME'] = '/'": r"variable HOME=b'/'",
    "del os.environ['HOME']": "no variable HOME",
}
HARMLESS = [
    "threading.Thread(target=time.sleep, args=[0.2]).start()",
    "with subprocess.Popen(['true']), open(__file__): pass",
    "_thread.start_new_thread(threading.current_thread, ()); time.sleep(0.2)",
    "cycle = [open(__file__)]; cycle.append(cycle)",
    "os.environ['OWN'] = '1'; del os.environ['OWN']",
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Run one row per body, in one process, and return the report of pytest."""
    rows = [
        f"@pytest.mark.processes\ndef test_{i}(wide):\n    {body}\n"
        for i, body in enumerate([*LEFTOVERS, *HARMLESS])
    ]
    return run_rows(tmp_path_factory.mktemp("rows"), PLUGIN, HEAD + "\n".join(rows)).stdout


@pytest.mark.processes
@pytest.mark.either
@pytest.mark.parametrize("number", range(len(LEFTOVERS)), ids=list(LEFTOVERS))
def test_a_leftover_is_named(report, number):
    words = LEFTOVERS[list(LEFTOVERS)[number]]
    assert re.search(f"^test_rows.py::test_{number} left: ({words})$", report, re.M), report


@pytest.mark.processes
@pytest.mark.either
def test_the_rest_passes(report):
    """Each row itself passes, and a leftover is not blamed on the row after it."""
    rows = len(LEFTOVERS) + len(HARMLESS)
    assert f"{rows} passed, {len(LEFTOVERS)} errors" in report, report
