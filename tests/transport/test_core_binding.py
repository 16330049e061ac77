"""Core binding: the plan as a table; binding and BLAS threads in child processes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict

import pytest

from hpctrain.core.errors import HereError
from hpctrain.core.launchers import SINGLE_RANK, Launched
from hpctrain.transport.mpi.installation import (
    _LIBMPI_PATTERN,
    LoadedMpi,
    find_mpiexec,
    has_pmix,
    has_ulfm,
    load_mpi,
    missing_mpi_text,
)
from hpctrain.transport.placement.core_binding import (
    allow_all_cores,
    plan_binding,
    sort_by_topology,
)


def rank(local_rank, local_size, size=8):
    return Launched("openmpi", 0, size, local_rank, local_size)


EIGHT = tuple(range(8))
PAIRED = (0, 4, 1, 5, 2, 6, 3, 7)  # siblings side by side

# launched, allowed, online, environ -> cores, BLAS threads, a word of the note
PLANS = {
    "alone": (SINGLE_RANK, EIGHT, EIGHT, {}, EIGHT, 8, "alone"),
    "alone, bound": (SINGLE_RANK, (2, 3), EIGHT, {}, (2, 3), 2, "alone"),
    "first block": (rank(0, 4), EIGHT, EIGHT, {}, (0, 1), 2, "took 2 of 8"),
    "last block": (rank(3, 4), EIGHT, EIGHT, {}, (6, 7), 2, "took 2 of 8"),
    "uneven, small": (rank(0, 3), EIGHT, EIGHT, {}, (0, 1), 2, "took 2 of 8"),
    "uneven, large": (rank(2, 3), EIGHT, EIGHT, {}, (5, 6, 7), 2, "took 3 of 8"),
    "siblings": (rank(1, 4), EIGHT, PAIRED, {}, (1, 5), 2, "took 2 of 8"),
    "gaps": (rank(1, 2), (1, 3, 9, 11), (1, 3, 9, 11), {}, (9, 11), 2, "took 2 of 4"),
    "one core each": (rank(7, 8), EIGHT, EIGHT, {}, (7,), 1, "took 1 of 8"),
    "too many": (rank(1, 9, 9), EIGHT, EIGHT, {}, EIGHT, 1, "9 ranks share 8 cores"),
    "bound to one core": (rank(1, 2), (5,), EIGHT, {}, (5,), 1, "bound by the launcher"),
    "bound to a socket of 4": (rank(1, 4), (0, 1, 2, 3), EIGHT, {}, (0, 1, 2, 3), 2, "bound"),
    "local rank unknown": (rank(None, None, 4), EIGHT, EIGHT, {}, EIGHT, 2, "not bound"),
    "local size unknown": (rank(1, None, 16), EIGHT, EIGHT, {}, EIGHT, 1, "not bound"),
    "user's OpenMP": (rank(0, 4), EIGHT, EIGHT, {"OMP_NUM_THREADS": "3"}, (0, 1), 3, "took"),
    "nested OpenMP": (rank(0, 4), EIGHT, EIGHT, {"OMP_NUM_THREADS": "4,2"}, (0, 1), 4, "took"),
    "OpenBLAS first": (
        SINGLE_RANK, EIGHT, EIGHT, {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "5"},
        EIGHT, 5, "alone",
    ),
    "no number": (SINGLE_RANK, EIGHT, EIGHT, {"MKL_NUM_THREADS": "0"}, EIGHT, 8, "alone"),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANS)
def test_plan(case):
    launched, allowed, online, environ, cores, threads, word = PLANS[case]
    binding = plan_binding(launched, set(allowed), online, environ)
    assert (binding.cores, binding.blas_threads) == (cores, threads)
    assert word in binding.note


@pytest.mark.parametrize("ranks", range(1, 9))
def test_blocks_use_every_core_once(ranks):
    plans = [plan_binding(rank(r, ranks), set(EIGHT), PAIRED, {}) for r in range(ranks)]
    assert sorted(core for p in plans for core in p.cores) == list(EIGHT)
    assert max(len(p.cores) for p in plans) - min(len(p.cores) for p in plans) <= 1


def test_by_place_keeps_every_core():
    assert sorted(sort_by_topology(os.sched_getaffinity(0))) == sorted(os.sched_getaffinity(0))


BOUND = """
import json, os, sys
import numpy, threadpoolctl
from hpctrain.core.launchers import Launched
from hpctrain.transport.placement.core_binding import bind_process
online = sorted(os.sched_getaffinity(0))
binding = bind_process(Launched("openmpi", 1, 2, 1, 2), online)
masks = {t: sorted(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task")}
pools = [p["num_threads"] for p in threadpoolctl.threadpool_info() if p["user_api"] == "blas"]
print(json.dumps([online, binding.cores, binding.blas_threads, masks, pools]))
"""


@pytest.mark.processes
@pytest.mark.parametrize("threads_set", [None, "1"])
@pytest.mark.either
def test_bind_process_moves_every_thread_and_limits_blas(start, threads_set):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    env = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "")
    job = start("-c", BOUND, env=env | {"OMP_NUM_THREADS": threads_set or ""}).finish()
    online, cores, threads, masks, pools = json.loads(job.stdout)
    assert cores == online[len(online) // 2 :]
    assert all(mask == cores for mask in masks.values())
    assert threads == (int(threads_set) if threads_set else len(online) // 2)
    assert set(pools) == {threads}


@pytest.mark.processes
def test_probe_names_the_loaded_mpi_and_its_mpiexec(start):
    job = start("-m", "hpctrain.transport.mpi.installation").finish()
    printed = json.loads(job.stdout)
    assert os.access(printed.pop("mpiexec"), os.X_OK)
    assert printed.pop("ulfm") is has_ulfm(load_mpi())
    assert printed == asdict(load_mpi())
    assert os.path.basename(printed["libmpi"]).startswith("libmpi")


def test_only_open_mpi_has_ulfm():
    """MPICH has functions of the same names."""
    mpi = load_mpi()
    assert has_ulfm(mpi) is (mpi.vendor == "Open MPI" and int(mpi.version.split(".")[0]) >= 5)
    assert not has_ulfm(LoadedMpi("Open MPI", "5.0.0", ""))


def test_whether_mpi_knows_pmix():
    assert not has_pmix(LoadedMpi("MPICH", "4.3.2", "libc.so.6"))
    assert has_pmix(LoadedMpi("MPICH", "4.3.2", ""))  # unknown: let it try
    mpi = load_mpi()
    assert has_pmix(mpi) or mpi.vendor != "Open MPI"


WITHOUT_MPI = {
    "a script": ("-c", "import hpctrain; hpctrain.init()"),
    "launch": ("-m", "hpctrain", "launch", "-n", "2", "train", "digits"),
}


@pytest.mark.processes
@pytest.mark.parametrize("way", WITHOUT_MPI)
def test_without_any_mpi_the_remedy_comes_first(start, way):
    nowhere = ":".join(f"/nowhere/libmpi.so.{number}" for number in range(40))
    job = start(*WITHOUT_MPI[way], env={"MPI4PY_LIBMPI": nowhere}).finish()
    remedy, reason = job.stderr.splitlines()
    assert job.returncode == 2
    assert remedy.startswith("hpctrain: load an MPI: `module load`") and "[openmpi]'" in remedy
    assert reason.startswith("  mpi4py finds none that it can load: there is no libmpi.so.0, ")
    assert len(reason) <= 300


ABSENT = ": cannot open shared object file: No such file or directory"
# what the loader says of each library that mpi4py tries: what is printed
ATTEMPTS = {
    f"/env/libmpi.so.12{ABSENT}\nlibmpi.so.12{ABSENT}\nlibmpi.so.40{ABSENT}":
        "there is no libmpi.so.12, libmpi.so.40",
    f"libmpi.so.12{ABSENT}\nlibucp.so.0{ABSENT}": f"libucp.so.0{ABSENT}",
    "libmpi.so.40: wrong ELF class: ELFCLASS32": "libmpi.so.40: wrong ELF class: ELFCLASS32",
    "": "cannot load MPI library",
}  # fmt: skip


@pytest.mark.parametrize("attempts", ATTEMPTS)
def test_of_libraries_that_are_not_there_the_names_are_listed(attempts):
    text = missing_mpi_text(f"cannot load MPI library\n{attempts}")
    assert text.endswith(f" that it can load: {ATTEMPTS[attempts]}")


def test_without_mpi4py_the_reason_is_its_absence(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    load_mpi.cache_clear()
    with pytest.raises(HereError) as refused:
        load_mpi()
    remedy, reason = str(refused.value).splitlines()
    assert "hpctrain[openmpi]" in remedy and "mpi4py" in reason


def made_mpiexec(folder, version):
    folder.mkdir(parents=True)
    (folder / "mpiexec").write_text(f"#!/bin/sh\necho '{version}'\n")
    (folder / "mpiexec").chmod(0o755)
    return str(folder / "mpiexec")


def test_mpiexec_of_another_vendor_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.prefix", str(tmp_path / "nowhere"))
    made_mpiexec(tmp_path / "a" / "bin", "Intel(R) MPI Library")
    beside = made_mpiexec(tmp_path / "b" / "bin", "HYDRA build details")
    path = f"{tmp_path}/a/bin:{shutil.which('sh').rpartition('/')[0]}"
    monkeypatch.setenv("PATH", path)
    library = str(tmp_path / "b" / "lib" / "libmpi.so.12")
    assert find_mpiexec(LoadedMpi("MPICH", "4.3", library)) == beside
    elsewhere = LoadedMpi("Intel MPI", "2021", library)
    assert find_mpiexec(elsewhere) == f"{tmp_path}/a/bin/mpiexec"
    assert find_mpiexec(LoadedMpi("Some MPI", "1", library)) is None


@pytest.mark.parametrize(
    "path, is_libmpi",
    [
        ("/usr/lib/libmpi.so.40.30.4", True),
        ("/usr/lib/libmpich.so.12", True),
        ("/opt/lib/libmpi_abi.so.0", True),
        ("/opt/cray/lib/libmpi_gnu_123.so.12.0.0", True),
        ("/opt/cray/lib/libmpi_gtl_cuda.so.0", False),
        ("/usr/lib/libmpi_cxx.so.40", False),
        ("/usr/lib/libmpi_mpifh.so.40", False),
        ("/usr/lib/libmpicxx.so.12", False),
        ("/usr/lib/libmpifort.so.12", False),
        ("/env/mpi4py/MPI.openmpi.cpython-311-x86_64-linux-gnu.so", False),
    ],
)
def test_which_file_is_libmpi(path, is_libmpi):
    assert bool(_LIBMPI_PATTERN.search(path)) is is_libmpi


def test_unbound_for_a_while():
    before = os.sched_getaffinity(0)
    core = {min(before)}
    os.sched_setaffinity(0, core)
    try:
        with allow_all_cores():
            assert os.sched_getaffinity(0) >= before
        assert os.sched_getaffinity(0) == core
    finally:
        os.sched_setaffinity(0, before)
