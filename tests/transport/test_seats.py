"""What is wrong with the seats of several ranks: as a table, and said by a real job."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from hpctrain.transport.seats import Seated, faults, ranges

# Four cores a node, two GPUs.
ONE = Seated("a", "srun", 0, "0", 4, 1)
TWO = replace(ONE, local_rank=1, cores="1")
ON_GPU = replace(ONE, gpu="G0", gpus=2)
OTHER_GPU = replace(TWO, gpu="G1", gpus=2)
ALL = replace(ONE, cores="0-3")


def many(count, seat):
    """Return `count` seats like `seat` that were told their local ranks rightly."""
    return [replace(seat, local_rank=n) for n in range(count)]


# seats of all ranks -> for each fault its name, its ranks, words of it
CASES = {
    "one each": ([ONE, TWO], []),
    "a GPU each": ([ON_GPU, OTHER_GPU], []),
    "a GPU of each of two nodes": ([ON_GPU, replace(ON_GPU, host="b")], []),
    "two on a GPU": (
        [ON_GPU, replace(OTHER_GPU, gpu="G0")],
        [("GPUs shared", (0, 1), "ranks 0-1 share G0 of a, and 1 of its GPUs are idle")],
    ),
    "more ranks than GPUs": (
        [replace(s, cores=f"{n}", local_rank=n) for n, s in enumerate([ON_GPU, OTHER_GPU] * 2)],
        [],
    ),
    "one GPU for all": ([replace(ON_GPU, gpus=1), replace(TWO, gpu="G0", gpus=1)], []),
    "a server without a GPU": ([ONE, replace(OTHER_GPU, gpus=1)], []),
    "all on one core": (
        many(3, ONE),
        [("cores shared", (0, 1, 2), "ranks 0-2 of a all run on core 0, and 3 others are idle")],
    ),
    "all on one core of one": (many(3, replace(ONE, offered=1)), []),
    "a core each, on two nodes": ([ONE, replace(ONE, host="b")], []),
    "three on two cores": (
        many(3, replace(ONE, cores="0-1")),
        [("cores shared", (0, 1, 2), "cores 0-1, and 2 others are idle")],
    ),
    "a socket shared": (many(2, replace(ONE, cores="0-1")), []),
    "more ranks than cores": (many(6, ALL), []),
    "threads of one": (
        [ONE, replace(TWO, blas_threads=2)],
        [("BLAS threads", (1,), "rank 1 of a: 2")],
    ),
    "threads of all": (
        many(4, replace(ALL, blas_threads=4)),
        [("BLAS threads", (0, 1, 2, 3), "16 BLAS threads on 4 cores, so they take turns")],
    ),
    "as many threads as cores": (many(2, replace(ALL, blas_threads=2)), []),
    "a daemon's local rank": (
        [ONE, replace(TWO, local_rank=0), replace(ONE, host="b")],
        [("local ranks", (0, 1), "were all told local rank 0 by srun (SLURM_LOCALID")],
    ),
    "and what comes of it": (
        [ON_GPU] * 2,
        [("local ranks", (0, 1), ""), ("GPUs shared", (0, 1), ""), ("cores shared", (0, 1), "")],
    ),
    "not told": ([replace(ALL, local_rank=None)] * 3, []),
}


@pytest.mark.parametrize("case", CASES)
def test_faults(case):
    seats, wanted = CASES[case]
    found = faults(seats)
    assert [(one.name, one.ranks) for one in found] == [(name, ranks) for name, ranks, _ in wanted]
    for one, (_, _, words) in zip(found, wanted, strict=True):
        assert words in one.seen
        assert str(one).endswith(f": {one.remedy}") and one.remedy


@pytest.mark.parametrize(
    "numbers, text", [([], ""), ([3], "3"), ([0, 1, 2, 8, 10, 11], "0-2,8,10-11")]
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text


MISLED = """
import logging, os
logging.basicConfig()
os.sched_setaffinity(0, {int(os.environ["CORE"])})
of_openmpi = "OMPI_COMM_WORLD_RANK" in os.environ
os.environ["OMPI_COMM_WORLD_LOCAL_RANK" if of_openmpi else "MPI_LOCALRANKID"] = "0"
import hpctrain
hpctrain.init()
"""


@pytest.mark.processes
def test_a_job_says_once_that_all_run_on_one_core(start):
    """A launcher told each rank local rank 0, and each was bound to the same core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    env = {"OMP_NUM_THREADS": "3", "CORE": str(cores[0])}
    ended = start("-c", MISLED, ranks=2, env=env).finish()
    assert ended.returncode == 0, ended.stderr
    for words in (
        "ranks 0-1 of",
        "all told local rank 0",
        "all run on core",
        "6 BLAS threads on 1",
    ):
        assert ended.stderr.count(words) >= 1, ended.stderr
    assert ended.stderr.count("WARNING:hpctrain") == 1
