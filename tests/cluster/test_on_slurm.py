"""Training in jobs of a real Slurm of four nodes; see tests/real_slurm.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import real_slurm

from hpctrain import rundir

pytestmark = pytest.mark.processes

HOLD = """
import os, time, real_slurm
with real_slurm.running(os.environ) as slurm:
    slurm.run("srun", "--nodes=1", "true")
    job = slurm.sbatch("#!/bin/sh\\nsleep 600", cwd=slurm.folder)
    slurm.wait(job, "RUNNING")
    print(slurm.folder, flush=True)
    time.sleep(600)
"""


def test_slurm_ends_with_those_who_started_it():
    if reason := real_slurm.missing():
        pytest.skip(reason)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    owner = subprocess.Popen([sys.executable, "-c", HOLD], env=environ, stdout=subprocess.PIPE)
    folder = Path(owner.stdout.readline().decode().strip())
    assert _processes_of(folder) >= 8  # munged, a controller, four nodes, a step daemon, its job
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=30)
    deadline = time.monotonic() + 30
    while (left := folder.exists() or _processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def _processes_of(folder: Path) -> int:
    return sum(str(folder) in said for said in map(_told, psutil.process_iter()))


def _told(process: psutil.Process) -> str:
    try:
        return " ".join([*process.cmdline(), process.environ().get("SLURM_CONF", "")])
    except psutil.Error:
        return ""


def test_srun_trains_on_four_nodes(slurm, tmp_path):
    text = f"#!/bin/bash\n{slurm.srun} hpctrain train digits --epochs 3 --out run\n"
    job = slurm.sbatch(text, "--nodes=4", "--ntasks-per-node=1", cwd=tmp_path)
    assert slurm.wait(job) == "COMPLETED", slurm.told(job)
    summary = rundir.read_summary(tmp_path / "run")
    assert (summary["status"], summary["world_size"]) == ("done", 4)
    assert summary["hosts"] == list(real_slurm.NODES)
    assert summary["test_accuracy"] > 0.9
