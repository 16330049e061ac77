"""Faults planted by real means, end to end: exit code, verdict, remedy, JSON.

threads         MPI itself is asked for less, before hpctrain asks for more
/dev/shm, disk  small file systems, mounted where this job alone sees them
GPUs            stand-ins, of which all ranks are shown the first alone
cores           a control group that gives one rank a fiftieth of a core's time
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import cupy_package
import pytest
from processes import BIN

pytestmark = [pytest.mark.processes, pytest.mark.either]
QUICK = {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}

FUNNELED = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
ask = MPI.Init_thread
MPI.Init_thread = lambda required: ask(min(required, MPI.THREAD_FUNNELED))
"""


def result(file):
    """Return what --json keeps: the exit code, and the checks by their name."""
    table = json.loads(file.read_text())
    return table["exit_code"], {check["name"]: check for check in table["checks"]}


def on_path(*folders):
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])}


def test_an_mpi_without_threads(hpctrain, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(FUNNELED)
    file, environ = tmp_path / "found.json", QUICK | on_path(tmp_path)
    ended = hpctrain("doctor", "--json", file, env=environ, timeout=100)
    _, checks = result(file)
    assert ended.returncode == any(check["verdict"] == "bad" for check in checks.values())
    has_few_threads(checks, ended)


def has_few_threads(checks, ended):
    """Assert that the level of `FUNNELED` was told."""
    assert checks["threads"]["verdict"] == "slow"
    assert checks["threads"]["seen"].startswith("MPI_THREAD_FUNNELED: gradients cannot travel")
    assert "threads: use an MPI that was built with MPI_THREAD_MULTIPLE" in ended.stdout


SPACE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
SMALL = "mount -t tmpfs -o size=64k tmpfs"
#: For `python -c`, which `start` runs: another program in its place.
INSTEAD = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"


@cache
def refused():
    """Return why nothing can be mounted for one job alone; "" where it can."""
    try:
        completed = subprocess.run([*SPACE, "sh", "-c", f"{SMALL} /dev/shm"], capture_output=True)
    except OSError as error:
        return f"unshare: {error.strerror}"
    return (
        f"no mount of one's own: {completed.stderr.decode().strip()}"
        if completed.returncode
        else ""
    )


@pytest.fixture
def with_little_room(start, tmp_path):
    """Run `hpctrain ARGUMENTS` where `folder` has 64 KiB; return how it ended."""
    if refused():
        pytest.skip(refused())

    def run(folder, *arguments, ranks=2):
        launcher = [BIN / "mpiexec", "-n", ranks] if ranks > 1 else []
        line = [*launcher, sys.executable, "-m", "hpctrain", *arguments]
        shell = f'{SMALL} {folder} && exec "$@"'
        started = start("-c", INSTEAD, *SPACE, "sh", "-c", shell, "-", *line, env=QUICK)
        return started.finish(100)

    return run


def test_a_tiny_dev_shm_is_told_before_mpi_dies_of_it(with_little_room, tmp_path):
    file = tmp_path / "found.json"
    ended = with_little_room("/dev/shm", "doctor", "--job", "--json", file)
    code, checks = result(file)  # MPICH ends by a bus error; what was seen before is kept
    assert code == 1 and ended.returncode, ended.stdout + ended.stderr
    assert "64 KiB free in /dev/shm: MPI may end with a bus error" in ended.stderr
    assert checks["shared memory"]["verdict"] == "bad"
    assert "--shm-size" in checks["shared memory"]["remedy"]


def test_a_tiny_dev_shm_of_one_node(with_little_room, tmp_path):
    file = tmp_path / "found.json"
    ended = with_little_room("/dev/shm", "doctor", "--json", file, ranks=1)
    code, checks = result(file)
    assert code == ended.returncode == 1
    assert "KiB free in /dev/shm" in checks["shared memory"]["seen"]  # what MPI has left
    assert f"shared memory: {checks['shared memory']['remedy']}" in ended.stdout
    if checks["ranks"]["verdict"] == "bad":  # those that were tried died, and of this
        seen = checks["ranks"]["seen"]  # Hydra may report the rank that it ended thereafter
        assert "Bus error" in seen or "signal 15" in seen
        assert "see `shared memory`" in checks["ranks"]["remedy"]


def test_a_full_disk(with_little_room, tmp_path):
    (tmp_path / "runs").mkdir()
    file = tmp_path / "found.json"
    ended = with_little_room(
        tmp_path / "runs", "doctor", "--job", "--json", file, "--out", tmp_path / "runs"
    )
    code, checks = result(file)
    assert code == 1 and ended.returncode
    assert checks["disk"]["verdict"] == checks["output folder"]["verdict"] == "bad"
    assert "No space left on device" in checks["output folder"]["seen"]
    assert "output folder: name a writable folder with --out" in ended.stdout
    assert checks["sums"]["verdict"] == "ok"  # and the rest is looked at


def test_a_gpu_that_all_ranks_take_and_no_threads(hpctrain, tmp_path):
    """The stand-in is one GPU to each rank, as CUDA shows it; NVML knows of two."""
    (tmp_path / "sitecustomize.py").write_text(FUNNELED)
    site, tests = cupy_package.install(tmp_path / "site"), Path(__file__).parents[2]
    output = {"FAKE_GPUS": "1", "FAKE_CRASH": "1", "CUDA_VISIBLE_DEVICES": "0"}
    environ = QUICK | on_path(tmp_path, site, tests) | output | {"XDG_CACHE_HOME": str(tmp_path)}
    file = tmp_path / "found.json"
    arguments = ("doctor", "--job", "--device", "gpu", "--json", file)
    ended = hpctrain(*arguments, ranks=2, env=environ, timeout=100)
    code, checks = result(file)
    assert code == 1 and ended.returncode, ended.stderr
    assert checks["GPUs shared"]["verdict"] == "bad"
    assert "ranks 0-1 share GPU-" in checks["GPUs shared"]["seen"]
    assert "another of its GPUs is idle" in checks["GPUs shared"]["seen"]
    assert "every rank sees all GPUs" in checks["GPUs shared"]["remedy"]
    assert "1 of 2: CUDA_VISIBLE_DEVICES=0" in checks["GPUs in sight"]["seen"]
    assert "unset CUDA_VISIBLE_DEVICES" in checks["GPUs in sight"]["remedy"]
    has_few_threads(checks, ended)


@pytest.fixture
def group():
    """A control group that gives its processes a fiftieth of a core's time."""
    at = Path("/sys/fs/cgroup/cpu")
    folder = (at if at.is_dir() else at.parent) / f"hpctrain-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"{folder}: {error.strerror}")
    try:
        if at.is_dir():
            (folder / "cpu.cfs_quota_us").write_text("2000")
        else:
            (folder / "cpu.max").write_text("2000 100000")
        yield folder
    except OSError as error:
        pytest.skip(f"{folder}: {error.strerror}")
    finally:
        folder.rmdir()


# In the group while cores are tried and no longer: it would hold up the start of Python, too.
THROTTLED = """
import os, sys
group, *sys.argv[1:] = sys.argv[1:]
from hpctrain.tools.doctor.job import cores
measure = cores.measure_cores
def held_up(*arguments):
    for folder, function in ((group, lambda: measure(*arguments)), (os.path.dirname(group), None)):
        open(folder + "/cgroup.procs", "w").write(str(os.getpid()))
        found = function() if function else found
    return found
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    cores.measure_cores = held_up
from hpctrain.cli import main
main()
"""


def test_a_core_of_which_a_rank_gets_a_fiftieth(start, tmp_path, group):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    file = tmp_path / "found.json"
    job = ("doctor", "--job", "--json", file)
    start("-c", THROTTLED, group, *job, ranks=2, env=QUICK).finish(100)
    speed = result(file)[1]["speed of cores"]
    assert speed["verdict"] == "slow"
    assert f"core {cores[-1]} of" in speed["seen"] and "(rank 1): " in speed["seen"]
    assert "a quota of 0.02 cores" in speed["seen"]
    assert "limits.cpu" in speed["remedy"]
