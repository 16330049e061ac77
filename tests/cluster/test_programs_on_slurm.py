"""A program that knows nothing of hpctrain in jobs of a real Slurm; see tests/lib/real_slurm.py."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import real_slurm

from hpctrain.cluster.slurm.render import Job, render
from hpctrain.core.run_files import run_folder

STEPS, EVERY, RATE = 60, 5, 0.1
SCRIPT = f"""
import json, os, signal, sys, time
from pathlib import Path
from mpi4py import MPI

handles, pause_s = sys.argv[1] == "handles", float(sys.argv[2])
asked, path, comm = [], Path("checkpoint.json"), MPI.COMM_WORLD
if handles:
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
w, losses = json.loads(path.read_text()) if path.exists() else (0.0, [])
while len(losses) < {STEPS}:
    target = (len(losses) * 7 + comm.rank * 3) % 11 / 11
    loss, gradient = (w - target) ** 2, 2 * (w - target)
    w -= {RATE} * comm.allreduce(gradient) / comm.size
    losses.append(comm.allreduce(loss) / comm.size)
    stops = comm.allreduce(len(asked), MPI.MAX) > 0
    if comm.rank == 0 and (stops or len(losses) % {EVERY} == 0):
        path.with_suffix(".new").write_text(json.dumps([w, losses]))
        os.replace(path.with_suffix(".new"), path)
    if stops:
        comm.barrier()
        sys.exit(75)
    time.sleep(pause_s)
if comm.rank == 0:
    Path("ranks").write_text(os.environ["WORLD_SIZE"] + os.environ["HPCTRAIN_RUN"])
"""


def losses(ranks: int) -> list[float]:
    """Return the losses of a run that nothing interrupts."""
    w, means = 0.0, []
    for step in range(STEPS):
        errors = [w - (step * 7 + rank * 3) % 11 / 11 for rank in range(ranks)]
        w -= RATE * sum(2 * error for error in errors) / ranks
        means.append(sum(error**2 for error in errors) / ranks)
    return means


@pytest.mark.processes
@pytest.mark.either
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["handles", pytest.param("knows nothing", marks=pytest.mark.full)])
def test_a_program_preempted_twice_has_the_losses_of_one_that_is_not(slurm, tmp_path, kind):
    (tmp_path / "plain.py").write_text(SCRIPT)
    pause_s = "0.1" if kind == "handles" else "0.4"  # until SIGTERM, with MPICH
    program = (sys.executable, "plain.py", kind, pause_s)
    options = {"warn_s": 10, "options": {"nodelist": "n3,n4"}}
    text = render(Job(program=program, nodes=2, out="run", **options))
    job, path = slurm.sbatch(text, cwd=tmp_path), tmp_path / "checkpoint.json"

    def steps() -> int:
        return len(json.loads(path.read_text())[1]) if path.exists() else 0

    for restarts in (1, 2):
        start = steps()
        real_slurm.until(lambda: steps() > start, 100, lambda: slurm.told(job))  # noqa: B023
        urgent = ("--partition=urgent", "--nodelist=n3", "--exclusive")
        slurm.wait(slurm.sbatch("#!/bin/sh\n:", *urgent, cwd=tmp_path))
        slurm.wait(job, "PENDING")
        assert slurm.job(job)["Restarts"] == str(restarts)
        # srun ends ranks after one has left with 75: the highest code counts
        reasons = ["asked to stop, and", *["on request (preempted)"] * (kind == "handles")]
        assert any(reason in slurm.told(job) for reason in reasons)
        slurm.hurry(job)
    assert slurm.finish(job) == "COMPLETED", slurm.told(job)
    assert run_folder.read_summary(tmp_path / "run")["status"] == "done"
    np.testing.assert_array_equal(json.loads(path.read_text())[1], losses(2))
    assert (tmp_path / "ranks").read_text() == f"2{tmp_path}/run"
