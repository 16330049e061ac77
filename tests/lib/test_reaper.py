"""Nothing of a test run outlives pytest, however pytest ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import real_slurm
import reaper
from processes import Job

pytestmark = [pytest.mark.processes, pytest.mark.either]
START_S, END_S = 200, 100  # other tests may share the cores

#: A test that is under way: ranks of MPI, a mount, temporary files, a job of Slurm, and a file of
#: shared memory as ranks leave it that were killed.
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
    Path("/dev/shm", Path(os.environ[reaper.MARK]).name).touch()
    Path("run").write_text(os.environ[reaper.MARK])
    Path("under-way").touch()
    time.sleep(900)
"""
ON_RANKS = """
import os, time
from pathlib import Path
import pytest, reaper

@pytest.mark.mpi
def test_under_way():
    from mpi4py import MPI
    time.sleep(3 * reaper.LOOK_INTERVAL_S)
    MPI.COMM_WORLD.barrier()
    Path("run").write_text(os.environ[reaper.MARK])
    Path("under-way").touch()
    time.sleep(900)
"""
COMMAND = "-m pytest test_inner.py -p conftest -p no:cacheprovider --rootdir=."


@pytest.fixture
def under_way(start, tmp_path):
    """Start a run of a test, and wait until the test is under way; return its job and its mark."""

    def under_way(test: str, *options: str, **how: int) -> tuple[Job, str]:
        (tmp_path / "test_inner.py").write_text(test)
        path = f"{Path(__file__).parents[1]}{os.pathsep}{Path(__file__).parent}"
        job = start(*COMMAND.split(), *options, env={"PYTHONPATH": path}, **how)
        until(lambda: (tmp_path / "under-way").exists() or job.process.poll() is not None, START_S)
        assert job.process.poll() is None, job.output()
        return job, (tmp_path / "run").read_text()

    return under_way


def ends(job: Job, run: str, number: int) -> None:
    """Signal the process group of a run, and wait until nothing of it remains."""
    processes = psutil.Process(job.process.pid).children(recursive=True)
    segments = set().union(*(reaper.shared_memory(process.pid) for process in processes))
    assert len(processes) > 1
    os.killpg(job.process.pid, number)
    job.process.wait(END_S)
    until(lambda: not (remains(run) or any(map(is_alive, processes))), END_S)
    until(lambda: not [path for path, _ in segments if os.path.exists(path)], END_S)


@pytest.mark.sample(1)
@pytest.mark.timeout(START_S + 3 * END_S)
@pytest.mark.parametrize("name", ["KILL", "TERM", "INT"])
def test_nothing_outlives_a_killed_test_run(under_way, name):
    ends(*under_way(INNER), signal.Signals[f"SIG{name}"])


@pytest.mark.timeout(START_S + 3 * END_S)
def test_ranks_that_run_tests_do_not_outlive_their_launcher(under_way):
    ends(*under_way(ON_RANKS, "--with-mpi", ranks=2), signal.SIGKILL)


def remains(run: str) -> list[object]:
    """Return the processes, the mounts and the files that remain of a run."""
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if run in line]
    files = [path for path in (run, f"/dev/shm/{Path(run).name}") if os.path.exists(path)]
    return [*reaper.find_processes(run), *mounts, *files]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition, limit_s: float) -> None:
    real_slurm.until(condition, limit_s, "the test run has neither begun nor ended")
