"""Stopped ranks and dead hosts of real jobs: the ranks left get an error and go on without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from limits import clock
from processes import LAUNCHER

from hpctrain.cluster.launch import find_mpi
from hpctrain.cluster.netlab.netlab import (
    Lab,
    build_command,
    rank_environment,
    unavailable_reason,
    unshare_command,
)
from hpctrain.core.interpreter import module_command

pytestmark = [pytest.mark.processes]
SCRIPT = str(Path(__file__).with_name("survivors.py"))
LIMIT_S = 100.0


@pytest.fixture
def mpi():
    mpi = find_mpi()
    if mpi.vendor != "Open MPI" or mpi.mpiexec is None:
        pytest.skip("survivors need Open MPI with ULFM")
    return mpi


@pytest.fixture
def run(tmp_path):
    """Return what runs a command until the named files are in the folder, and returns their texts.

    The launcher of a job with a dead host never ends: it is killed, with the whole lab.
    """
    processes = []

    def run(command: list[str], environ: dict[str, str], names: list[str]) -> dict[str, str]:
        process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE)
        processes.append(process)
        deadline = clock() + LIMIT_S
        while not all((tmp_path / name).exists() for name in names):
            assert clock() < deadline, sorted(os.listdir(tmp_path))
            time.sleep(0.05)
        return {path.name: path.read_text() for path in tmp_path.iterdir()}

    yield run
    for process in processes:
        process.stdin.close()
        process.kill()
        process.wait()


def lab_run(mpi, lab: Lab, folder: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    program = [sys.executable, SCRIPT, str(folder), *arguments]
    mpiexec, *options = build_command(mpi, lab, program)
    namespaces = module_command("hpctrain.cluster.netlab.namespaces")
    command = [*unshare_command(), *namespaces, json.dumps(asdict(lab))]
    environ = rank_environment(mpi, lab.ranks, os.environ) | {"OMPI_MCA_coll": "^han,cuda"}
    return [*command, mpiexec, "--with-ft", "ulfm", *options], environ


@pytest.mark.sample(1)
@pytest.mark.parametrize("victim", [0, 2])
def test_the_ranks_left_of_a_node_go_on(mpi, run, tmp_path, victim):
    command = [mpi.mpiexec, "--with-ft", "ulfm", "--bind-to", "none", "-n", "3", sys.executable]
    left = [rank for rank in range(3) if rank != victim]
    texts = run(
        [*command, SCRIPT, str(tmp_path), "stop", str(victim)],
        {**os.environ, **LAUNCHER},
        [f"survivor-{rank}" for rank in left],
    )
    assert texts == {"lost": ""} | {f"survivor-{rank}": "2" for rank in left}


@pytest.mark.sample(1)
@pytest.mark.parametrize("hosts, per_host, victim", [(3, 1, 1), (3, 2, 0)])
def test_the_hosts_left_go_on(mpi, run, tmp_path, hosts, per_host, victim):
    if reason := unavailable_reason():
        pytest.skip(reason)
    lab = Lab(hosts, per_host, 10**9)
    first = victim // per_host * per_host
    left = [rank for rank in range(lab.ranks) if not first <= rank < first + per_host]
    names = [f"survivor-{rank}" for rank in left] + [f"cut-off-{first}"]
    texts = run(*lab_run(mpi, lab, tmp_path, "cut", str(victim)), names)
    assert {texts[f"survivor-{rank}"] for rank in left} == {str(len(left))}
    assert "does not reach more than half" in texts[f"cut-off-{first}"]


def test_of_two_hosts_none_goes_on_without_the_other(mpi, run, tmp_path):
    if reason := unavailable_reason():
        pytest.skip(reason)
    texts = run(*lab_run(mpi, Lab(2, 1, 10**9), tmp_path, "cut", "1"), ["cut-off-0", "cut-off-1"])
    assert not any(name.startswith("survivor") for name in texts)
