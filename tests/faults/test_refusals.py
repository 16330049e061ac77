"""Bad input: one message before any training, for any number of ranks; exit code 2."""

from __future__ import annotations

import re
import signal
from importlib.util import find_spec

import numpy as np
import pytest
from jobs import MARK, sets
from tables import rows_of

from hpctrain.cluster import launch

pytestmark = pytest.mark.processes

# What is wrong with the command line of `train` -> what is said
# Other faults of recipes: tests/training/test_recipe.py.
UNKNOWN = {
    "recipe": (["digts"], "unknown recipe 'digts'; did you mean 'digits'?"),
    "engine": (
        ["digits", "--engine", "allredce"],
        "unknown [engine] kind 'allredce'; did you mean 'allreduce'?",
    ),
    "option": (["digits", "--epoch", "3"], "No such option '--epoch'. Did you mean '--epochs'?"),
}
#: On machines that have none, as those are on which tests run.
NO_GPU = "pip install 'hpctrain[cuda1"


def refused(ended, message, out):
    """Check that `message` was said once, that nothing else was, and that nothing was made."""
    assert ended.stderr.count(message) == 1, ended.stderr
    assert ended.stderr.count("hpctrain: ") == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.returncode == 2
    assert not out.exists()


@pytest.mark.parametrize("wrong", UNKNOWN)
@pytest.mark.either
def test_wrong_command_line(begin, wrong):
    args, message = UNKNOWN[wrong]
    job = begin(*args, ranks=4)
    ended = job.finish()
    refused(ended, message, job.out)


@pytest.mark.skipif(find_spec("cupy") is not None, reason="CuPy is installed here")
@pytest.mark.either
def test_no_gpu(begin):
    job = begin("digits", "--device", "gpu", ranks=2)
    refused(job.finish(), NO_GPU, job.out)


@pytest.mark.either
def test_launch_returns_the_code_of_a_refusal(begin):
    job = begin("digts", launch=True)
    refused(job.finish(), "did you mean 'digits'?", job.out)


@pytest.mark.either
def test_a_slow_rank_that_is_none(begin):
    job = begin("digits", *sets(faults_slow_rank=1, faults_slow_factor=10), ranks=None)
    refused(job.finish(), "[faults] slow_rank: expected less than 1, the number of", job.out)


def good():
    """Return arrays of 40 samples with 3 classes, and as many for a test."""
    y = np.arange(40) % 3
    return {"x": np.ones((40, 64)), "y": y, "x_test": np.ones((4, 64)), "y_test": y[:4]}


# What is done to good arrays -> what is said of the file. Other faults: tests/data.
DATA = {
    "missing": (None, "data.npz: expected a file, seen nothing"),
    "wrong for the model": ({"x": np.ones((40, 63)), "x_test": np.ones((4, 63))},
                            "[model] widths: expected 63 first"),
    "label too large": ({"y": np.arange(40)}, "[model] widths: expected at least 40 last"),
    "unseen label": ({"y_test": np.array([0, 1, 2, 3])}, "test label 3 of sample 3 is out of"),
    "fewer than ranks": ({"x": np.ones((1, 64)), "y": np.array([2])},
                         "1 training samples for 2 workers"),
}  # fmt: skip
ON_RANKS = ("missing", "label too large", "fewer than ranks")


@pytest.mark.parametrize("wrong", DATA)
@pytest.mark.either
def test_bad_data(begin, tmp_path, wrong):
    change, message = DATA[wrong]
    write(tmp_path / "data.npz", change)
    keys = sets(data_kind="npz", data_path="data.npz", model_widths="[64,16,10]")
    # The other rows on one process: that ranks speak with one voice does not hang on the fault.
    job = begin("digits", *keys, ranks=2 if wrong in ON_RANKS else None)
    refused(job.finish(), message, job.out)


def write(file, change):
    if change is None:
        return
    np.savez(file, **(good() | change))


@pytest.mark.either
def test_a_batch_smaller_than_the_job(digits):
    job = digits(*sets(optimizer_batch=2), ranks=3)
    refused(job.finish(), "2 samples per batch for 3 workers", job.out)


# What ranks call -> what every one of them is told; more of it in test_user_collectives.py
CALLS = {
    "np.ones(9)[::2]": "expected a C-contiguous array, seen shape (5,)",
    "np.ones(4, 'm8[s]')": "seen timedelta64[s]",
    "np.ones(4, 'f4' if mine else 'f8')":
        "2 have allreduce sum auto of float64 (4,), but rank 1 has allreduce sum auto of float32",
    "np.ones(4 + mine)": "auto of float64 (4,), but rank 1 has allreduce sum auto of float64 (5,)",
}  # fmt: skip
SCRIPT = """
import sys
import numpy as np
import hpctrain as ht
from hpctrain.core.errors import UsageError
mine = ht.init().rank == 1
*first, last = sys.argv[1:]
for call in first:
    try:
        ht.allreduce(eval(call))
    except UsageError as error:
        print(f"[rank {ht.init().rank} on .] UsageError: {error}", file=sys.stderr)
ht.allreduce(eval(last))
print("not refused")
"""


def test_allreduce_of_what_does_not_fit(start, mark):
    ended = start("-c", SCRIPT, *CALLS, ranks=3, env={MARK: mark}).finish()
    *messages, last = CALLS.values()
    for rank in range(3):
        for message in messages:
            reported = rf"\[rank {rank} on .*UsageError: .*{re.escape(message)}"
            assert re.search(reported, ended.stderr), ended.stderr
    # Nobody catches the last one: all ranks raise it, one reports it.
    assert ended.stderr.count(last) == ended.stderr.count("Traceback") == 1, ended.stderr
    assert ended.stdout == ""
    assert ended.returncode == 2


# The variables of the other MPI's launcher, for rank R of 4
REST = {
    "MPICH": {f"OMPI_COMM_WORLD_{name}": "R" for name in ("RANK", "LOCAL_RANK")}
    | {f"OMPI_COMM_WORLD_{name}": "4" for name in ("SIZE", "LOCAL_SIZE")},
    "Open MPI": {"PMI_RANK": "R", "PMI_SIZE": "4", "MPI_LOCALRANKID": "R", "MPI_LOCALNRANKS": "4"},
}


def test_the_launcher_of_another_mpi(start, mark, tmp_path):
    mpi = launch.find_mpi()
    jobs = []
    for rank in range(4):
        env = {name: value.replace("R", str(rank)) for name, value in REST[mpi.vendor].items()}
        jobs.append(start("-m", "hpctrain", "train", "digits", env={MARK: mark, **env}))
    first = jobs[0].finish()
    assert first.returncode == 2
    assert f"{mpi.vendor} ({mpi.libmpi})" in first.stderr
    assert "4 jobs of one rank" in first.stderr and "hpctrain launch -n 4" in first.stderr
    for job in jobs[1:]:
        if mpi.vendor == "MPICH":
            job.kill()  # as Open MPI's mpirun does when the first one fails; MPICH's does not
        else:
            assert job.finish().returncode == 2
        assert job.output() == ""
    assert not (tmp_path / "runs").exists()


def contents(folder):
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
            for path in sorted(folder.rglob("*"))}  # fmt: skip


@pytest.fixture
def used(tmp_path):
    """A folder with somebody's results in it."""
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    return folder


@pytest.mark.either
def test_a_used_folder_stays_as_it_is(digits, used):
    before = contents(used)
    ended = digits().finish()
    assert ended.returncode == 2
    assert ended.stderr.count("is in use: it holds checkpoints, metrics.jsonl. Add --resume") == 1
    assert contents(used) == before


@pytest.mark.either
def test_a_folder_that_another_job_writes(digits):
    # One rank: ranks that wait for each other take all cores. It removes no checkpoint of its own.
    first = digits("--epochs", "100000", *sets(checkpoint_keep=100000), ranks=1)
    first.reach(5, ranks=1)
    before = {path for path in first.out.rglob("*") if path.is_file()}
    rest = {"is in use": digits(ranks=1), "is being written by": digits("--resume", ranks=1)}
    for message, other in rest.items():
        ended = other.finish()
        assert (ended.returncode, ended.stderr.count(message)) == (2, 1), ended.stderr
    assert before - set(first.out.rglob("*")) == set()
    first.job.ranks()[-1].send_signal(signal.SIGUSR1)
    assert (first.finish().returncode, first.summary["status"]) == (75, "stopped")


@pytest.mark.either
def test_a_folder_that_two_jobs_take_at_the_same_time(digits):
    jobs = [digits("--epochs", "40", ranks=1) for _ in range(2)]
    ended = sorted((job.finish() for job in jobs), key=lambda item: item.returncode)
    assert [item.returncode for item in ended] == [0, 2]
    assert re.search("is in use|is being written by", ended[1].stderr)
    assert jobs[0].summary["status"] == "done"


# Seen by each rank before MPI starts, and by rank 0 alone after it.
REFUSED_BY_SRUN = {"digts": "did you mean 'digits'?", "digits": "out is in use"}


@pytest.mark.parametrize("recipe", rows_of(REFUSED_BY_SRUN, "digits"))
def test_srun_ends_with_our_own_code(slurm, tmp_path, recipe):
    """Though it ends all ranks when one has left with an error, and tells how it ended those."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    line = f"{slurm.srun} hpctrain train {recipe} --out out 2>said"
    job = slurm.sbatch(
        f"#!/bin/bash\n{line}; echo $? >code", "--nodes=2", "--ntasks-per-node=2", cwd=tmp_path
    )
    slurm.wait(job)
    text = (tmp_path / "said").read_text()
    assert text.count(REFUSED_BY_SRUN[recipe]) == 1, text
    assert (tmp_path / "code").read_text().strip() == "2", text
