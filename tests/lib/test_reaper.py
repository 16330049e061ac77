"""Nothing of a test run outlives pytest, however pytest ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import real_slurm
import reaper

pytestmark = pytest.mark.processes
START_S, END_S = 200, 100  # other tests may share the cores

#: A test that is under way: ranks of MPI, a mount, temporary files, and a job of Slurm.
INNER = f"""
import os, subprocess, tempfile, time
from pathlib import Path
import reaper, real_slurm

RANK = "from mpi4py import MPI; import time; MPI.COMM_WORLD.barrier(); print('up'); time.sleep(900)"

def test_under_way(start, request):
    start("-uc", RANK, ranks=2).until("up", {START_S})
    place = tempfile.mkdtemp()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], stderr=subprocess.DEVNULL)
    if real_slurm.missing() is None:
        slurm = request.getfixturevalue("slurm")
        slurm.sbatch("#!/bin/sh\\n: >began; exec sleep 900", cwd=slurm.folder)
        while not (slurm.folder / "began").exists():
            time.sleep(0.02)
    Path("run").write_text(os.environ[reaper.MARK])
    Path("under-way").touch()
    time.sleep(900)
"""
COMMAND = "-m pytest test_inner.py -p conftest -p no:cacheprovider --timeout=900 --rootdir=."


@pytest.mark.timeout(START_S + 2 * END_S)
@pytest.mark.parametrize("name", ["KILL", "TERM", "INT"])
def test_nothing_outlives_a_killed_test_run(start, tmp_path, name):
    (tmp_path / "test_inner.py").write_text(INNER)
    path = f"{Path(__file__).parents[1]}{os.pathsep}{Path(__file__).parent}"
    job = start(*COMMAND.split(), env={"PYTHONPATH": path})
    until(lambda: (tmp_path / "under-way").exists() or job.process.poll() is not None, START_S)
    assert job.process.poll() is None, job.output()
    run = (tmp_path / "run").read_text()
    processes = psutil.Process(job.process.pid).children(recursive=True)
    segments = [path for process in processes for path, _ in reaper.shared_memory(process.pid)]
    assert len(processes) >= (9 if real_slurm.missing() is None else 3)
    os.killpg(job.process.pid, signal.Signals[f"SIG{name}"])
    job.process.wait(END_S)
    until(lambda: not (remains(run) or any(map(is_alive, processes))), END_S)
    assert not [path for path in segments if os.path.exists(path)]


def remains(run: str) -> list[object]:
    """Return the processes, the folder and the mounts that remain of a run."""
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if run in line]
    return [*reaper.find_processes(run), *mounts, *[run] * os.path.exists(run)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition, limit_s: float) -> None:
    real_slurm.until(condition, limit_s, "the test run has neither begun nor ended")
