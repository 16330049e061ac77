"""The command as a whole, on this machine and with faults planted in its surroundings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import cupy_package
import pytest
from conftest import BIN


def checks(file):
    return {check["name"]: check for check in json.loads(file.read_text())["checks"]}


@pytest.mark.processes
def test_this_machine(hpctrain, tmp_path):
    environ = {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = hpctrain("doctor", "--json", tmp_path / "found.json", timeout=100, env=environ)
    found = checks(tmp_path / "found.json")
    wrong = [check for check in found.values() if check["verdict"] == "bad"]
    assert done.returncode == bool(wrong), done.stdout + done.stderr
    for name in ("MPI", "launcher", "ranks", "threads", "BLAS"):
        assert found[name]["verdict"] == "ok", found[name]
    assert "node " in done.stdout and "BLAS" in done.stdout


@pytest.mark.processes
@pytest.mark.either
def test_wrong_mpirun_and_too_many_threads(hpctrain, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "mpirun").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{BIN}:{os.environ['PATH']}"
    environ = {"PATH": path, "OMP_NUM_THREADS": "64", "OPENBLAS_NUM_THREADS": "64"}
    done = hpctrain("doctor", "--json", tmp_path / "found.json", timeout=100, env=environ)
    found = checks(tmp_path / "found.json")
    assert done.returncode == 1
    assert str(tmp_path / "bin" / "mpirun") in found["launcher"]["seen"]
    assert found["launcher"]["verdict"] == found["BLAS"]["verdict"] == "bad"


@pytest.mark.parametrize("arguments, word", [(["--json", "/none/x"], "cannot be written"),
                                             (["--jobs"], "No such option")])  # fmt: skip
@pytest.mark.processes
@pytest.mark.either
def test_refused(hpctrain, arguments, word):
    done = hpctrain("doctor", *arguments, timeout=100)
    assert (done.returncode, word in done.stderr) == (2, True), done.stderr


@pytest.mark.processes
@pytest.mark.either
def test_inside_a_job_it_is_refused(hpctrain):
    told = {"RANK": "0", "LOCAL_RANK": "0", "SIZE": "2"}
    environ = {f"OMPI_COMM_WORLD_{name}": value for name, value in told.items()}
    done = hpctrain("doctor", env=environ)
    assert done.returncode == 2
    assert "rank 0 of 2" in done.stderr and "doctor --job" in done.stderr


@pytest.mark.processes
@pytest.mark.either
def test_gpus_and_an_mpi_that_crashes_on_them(hpctrain, tmp_path):
    site, tests = cupy_package.install(tmp_path / "site"), Path(__file__).parents[1]
    path = f"{site}:{tests}:{os.environ.get('PYTHONPATH', '')}"
    environ = {"PYTHONPATH": path, "FAKE_CRASH": "1", "FAKE_GPUS": "1",
               "CUDA_VISIBLE_DEVICES": "1,GPU-1", "XDG_CACHE_HOME": str(tmp_path)}  # fmt: skip
    done = hpctrain("doctor", "--json", tmp_path / "found.json", timeout=100, env=environ)
    assert done.returncode == 1, done.stderr
    found = checks(tmp_path / "found.json")
    assert "names GPU-1 twice" in found["GPUs listed"]["seen"]
    assert "2 x NVIDIA H200; driver 580.65.06 (NVML)" in found["GPUs"]["seen"]
    assert found["CUDA-aware MPI"]["verdict"] == "slow"
    assert "segmentation fault" in found["CUDA-aware MPI"]["seen"]
    assert found["CUDA-aware MPI"]["remedy"]
    assert "no adapter that does RDMA" in found["GPUDirect RDMA"]["seen"]
    assert "NV2" in done.stdout  # the matrix


def test_the_trial_is_asked_of_a_child(monkeypatch, tmp_path):
    from hpctrain.doctor import examine

    cupy_package.install(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("FAKE_GPUS", "0")
    told = examine._probe_gpu_paths()
    assert told.verdict.across == "staged"
    assert "GPU" in told.verdict.reason
