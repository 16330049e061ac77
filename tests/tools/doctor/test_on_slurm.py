"""The preflight on a real Slurm: a whole job by srun, and trials with GPU memory inside a job."""

from __future__ import annotations

import json
import os
from pathlib import Path

import cupy_package
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.either]

JOB = """#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=1
{srun} hpctrain doctor --job --recipe digits --json found.json
{srun} --nodes=1 --ntasks=1 hpctrain doctor --json one.json
"""


def checks(file):
    return {check["name"]: check for check in json.loads(file.read_text())["checks"]}


def test_a_whole_job_by_srun(slurm, tmp_path):
    job = slurm.sbatch(JOB.format(srun=slurm.srun), "--export=ALL,OMP_NUM_THREADS=1", cwd=tmp_path)
    slurm.wait(job, "COMPLETED", "FAILED", limit_s=100)
    assert "checks" in (tmp_path / "found.json").read_text(), slurm.told(job)
    result = checks(tmp_path / "found.json")
    for name in ("versions", "recipe", "output folder", "sums", "clocks", "launcher"):
        assert name not in result or result[name]["verdict"] == "ok", result[name]
    assert result["ranks"]["seen"] == "4 ranks on 4 nodes, by srun"
    rows = json.loads((tmp_path / "found.json").read_text())["ranks"]
    assert [row["host"] for row in rows] == ["n1", "n2", "n3", "n4"]
    assert "node n[1-4]" in slurm.told(job)
    # And one node by itself, whose two ranks must not wait for the cores of their own step.
    assert checks(tmp_path / "one.json")["ranks"]["verdict"] == "ok", slurm.told(job)


TRIALS = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --gpus-per-node=2
hpctrain doctor --json found.json
"""


@pytest.mark.full
def test_trials_with_gpu_memory_by_srun(slurm, tmp_path):
    """Each in a step of its own that overlaps; MPI crashes on the pointers of the stand-in."""
    site, tests = cupy_package.install(tmp_path / "site"), Path(__file__).parents[2]
    path = f"{site}:{tests}:{os.environ.get('PYTHONPATH', '')}"
    variables = {"PYTHONPATH": path, "FAKE_CRASH": "1", "FAKE_GPUS": "2",
                 "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}  # fmt: skip
    export = ",".join(["ALL", *(f"{name}={value}" for name, value in variables.items())])
    job = slurm.sbatch(TRIALS, f"--export={export}", cwd=tmp_path)
    slurm.wait(job, "COMPLETED", "FAILED", limit_s=100)
    table = json.loads((tmp_path / "found.json").read_text())
    trials = table["gpu_paths"]["trials"]
    assert set(trials) == {"same_gpu", "same_node", "across"}
    assert [trial["pointer"] for trial in trials.values()] == [False] * 3, trials
    assert [trial["ipc"] for trial in trials.values()] == [True, True, None], trials
    assert table["gpu_paths"]["verdict"]["across"] == "staged"
    result = {check["name"]: check for check in table["checks"]}["CUDA-aware MPI"]
    assert result["verdict"] == "slow" and result["remedy"]
