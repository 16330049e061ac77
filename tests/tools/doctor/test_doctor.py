"""The command `hpctrain doctor` on this machine, with faults planted in its environment."""

from __future__ import annotations

import json
import os
from pathlib import Path

import cupy_package
import pytest
from processes import BIN


def checks(file):
    return {check["name"]: check for check in json.loads(file.read_text())["checks"]}


@pytest.mark.processes
def test_this_machine(hpctrain, tmp_path):
    environ = {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    completed = hpctrain("doctor", "--json", tmp_path / "found.json", timeout=100, env=environ)
    result = checks(tmp_path / "found.json")
    wrong = [check for check in result.values() if check["verdict"] == "bad"]
    assert completed.returncode == bool(wrong), completed.stdout + completed.stderr
    for name in ("MPI", "launcher", "ranks", "threads", "BLAS"):
        assert result[name]["verdict"] == "ok", result[name]
    assert "node " in completed.stdout and "BLAS" in completed.stdout


@pytest.mark.processes
@pytest.mark.either
def test_wrong_mpirun_too_many_threads_and_traps(hpctrain, tmp_path):
    (tmp_path / "job.sh").write_text("srun torchrun train.py\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpirun").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "mpirun").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{BIN}:{os.environ['PATH']}"
    environ = {"PATH": path, "OMP_NUM_THREADS": "64", "OPENBLAS_NUM_THREADS": "64",
               "NCCL_NET_PLUGIN": "ofi", "UENV_VIEW": "default"}  # fmt: skip
    arguments = ("--json", tmp_path / "found.json", "--script", tmp_path / "job.sh")
    completed = hpctrain("doctor", *arguments, timeout=100, env=environ)
    result = checks(tmp_path / "found.json")
    assert completed.returncode == 1
    assert str(tmp_path / "bin" / "mpirun") in result["launcher"]["seen"]
    for name in ("launcher", "BLAS", "torchrun", "NCCL_NET_PLUGIN"):
        assert result[name]["verdict"] == "bad"


@pytest.mark.parametrize("arguments, word", [(["--json", "/none/x"], "cannot be written"),
                                             (["--jobs"], "No such option")])  # fmt: skip
@pytest.mark.processes
@pytest.mark.either
def test_refused(hpctrain, arguments, word):
    completed = hpctrain("doctor", *arguments, timeout=100)
    assert (completed.returncode, word in completed.stderr) == (2, True), completed.stderr


@pytest.mark.processes
@pytest.mark.either
def test_inside_a_job_it_is_refused(hpctrain):
    reported = {"RANK": "0", "LOCAL_RANK": "0", "SIZE": "2"}
    environ = {f"OMPI_COMM_WORLD_{name}": value for name, value in reported.items()}
    completed = hpctrain("doctor", env=environ)
    assert completed.returncode == 2
    assert "rank 0 of 2" in completed.stderr and "doctor --job" in completed.stderr


@pytest.mark.processes
@pytest.mark.either
def test_gpus_and_an_mpi_that_crashes_on_them(hpctrain, tmp_path):
    site, tests = cupy_package.install(tmp_path / "site"), Path(__file__).parents[2]
    path = f"{site}:{tests}:{os.environ.get('PYTHONPATH', '')}"
    environ = {"PYTHONPATH": path, "FAKE_CRASH": "1", "FAKE_GPUS": "1",
               "CUDA_VISIBLE_DEVICES": "1,GPU-1", "XDG_CACHE_HOME": str(tmp_path)}  # fmt: skip
    completed = hpctrain("doctor", "--json", tmp_path / "found.json", timeout=100, env=environ)
    assert completed.returncode == 1, completed.stderr
    result = checks(tmp_path / "found.json")
    assert "names GPU-1 twice" in result["GPUs listed"]["seen"]
    assert "2 x NVIDIA H200; driver 580.65.06" in result["GPUs"]["seen"]
    assert result["CUDA-aware MPI"]["verdict"] == "slow"
    assert "segmentation fault" in result["CUDA-aware MPI"]["seen"]
    assert result["CUDA-aware MPI"]["remedy"]
    assert "no adapter with RDMA" in result["GPUDirect RDMA"]["seen"]
    assert "NV2" in completed.stdout  # the matrix


def test_the_trial_is_asked_of_a_child(monkeypatch, tmp_path):
    from hpctrain.tools.doctor import examine

    cupy_package.install(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("FAKE_GPUS", "0")
    reported = examine._probe_gpu_paths()
    assert reported.verdict.across == "staged"
    assert "GPU" in reported.verdict.reason
