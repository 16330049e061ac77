"""A rank's subprocess that starts MPI is refused at once, or is a job of its own."""

from __future__ import annotations

import os
import socket

import pytest

from hpctrain.core import rank_process
from hpctrain.core.launchers import RANK_PROCESS, without_rank_variables

SCRIPT = """
import os, subprocess, sys, hpctrain as ht
from hpctrain.core.launchers import without_rank_variables
world = ht.init("cpu")
clean = without_rank_variables(os.environ)
init = [sys.executable, "-c", "import hpctrain as ht; print(ht.init('cpu').size, 'rank')"]
train = [sys.executable, "-m", "hpctrain", "train", "digits"]
rows = (init, {}), (init, {"close_fds": False}), (train, {}), (init, {"env": clean})
for command, options in rows:
    end = subprocess.run(command, capture_output=True, text=True, timeout=50, **options)
    print(world.rank, end.returncode, end.stdout.strip(), end.stderr.replace("\\n", " "))
if os.fork() == 0:
    try:
        ht.init()
    except ValueError as error:
        print(world.rank, 2, "", error, flush=True)
    os._exit(0)
os.wait()
world.barrier()
"""


@pytest.mark.timeout(120)
def test_a_subprocess_of_a_rank_is_refused_or_a_job_of_its_own(start):
    completed = start("-c", SCRIPT, ranks=2).finish(100)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    for rank in "01":
        rows = [line for line in completed.stdout.splitlines() if line.startswith(f"{rank} ")]
        assert [row.split()[1] for row in rows] == ["2", "2", "2", "0", "2"], rows
        for row in (*rows[:3], rows[4]):
            assert f"was started by rank {rank} of 2 (process" in row, row
        assert "1 rank" in rows[3]


OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_NAMESPACE": "prterun-vm-7@1", "PMIX_RANK": "1",
}  # fmt: skip
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "1",
}  # fmt: skip
#: launcher -> (variables of a rank, what another job of the same launcher has)
LAUNCHERS = {
    "Open MPI": (OPENMPI, {"PMIX_NAMESPACE": "prterun-vm-8@1"}),
    "MPICH": (PMI, {"PMI_RANK": "0"}),
    "srun": (SLURM, {"SLURM_STEP_ID": "1"}),
    "srun with PMI": (SLURM | PMI, {"SLURM_STEP_ID": "1"}),
    "srun with PMIx": (SLURM | {"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.17.0"},
                       {"SLURM_STEP_ID": "1", "PMIX_NAMESPACE": "slurm.pmix.17.1"}),
}  # fmt: skip


@pytest.mark.either
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_variables_of_a_rank_in_its_subprocess(launcher, monkeypatch):
    variables, changes = LAUNCHERS[launcher]
    rank = dict(variables)
    rank_process.mark_rank(rank)
    assert rank_process.find_fault(rank) is None  # the rank itself
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert "started by rank 1 of 2" in rank_process.find_fault(rank)
    assert rank_process.find_fault(rank | changes) is None
    assert rank_process.find_fault(without_rank_variables(rank)) is None
    assert RANK_PROCESS not in without_rank_variables(rank)
    assert rank_process.find_fault(rank | {RANK_PROCESS: "?"}) is None


@pytest.mark.either
def test_jobs_of_mpich_differ_by_their_socket(monkeypatch):
    first, second = socket.socketpair()
    with first, second:
        rank = PMI | {"PMI_FD": str(first.fileno())}
        rank_process.mark_rank(rank)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        assert rank_process.find_fault(rank)  # a subprocess that inherits files
        assert rank_process.find_fault(rank | {"PMI_FD": str(second.fileno())}) is None
    assert rank_process.find_fault(rank)  # one that does not
