"""The backend between hosts: those of a netlab, with PyTorch's store over TCP, and of a Slurm."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from guests import features

HERE = Path(__file__).parent


@pytest.mark.timeout(240)
@pytest.mark.skipif(os.geteuid() != 0, reason="a netlab needs the right to create namespaces")
def test_each_feature_equals_a_single_process_on_two_hosts(start):
    lab = ("-m", "hpctrain", "netlab", "--hosts", 2, "--ranks-per-host", 2, "--")
    ended = start(*lab, sys.executable, HERE / "features.py").finish(timeout=220)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert all(f"{name}: " in ended.stdout for name in features.FEATURES)


@pytest.mark.timeout(240)
def test_a_script_runs_under_srun_as_it_is(slurm, tmp_path):
    script = HERE / "features.py"
    words = ("--nodes=2", "--ntasks-per-node=2", sys.executable, script, "ddp", "fsdp2", "1f1b")
    output = slurm.run("srun", *words, cwd=tmp_path, timeout=200)
    assert all(f"{name}: " in output for name in ("ddp", "fsdp2", "1f1b"))
