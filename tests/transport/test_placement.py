"""Placement faults of several ranks: as a table, and in the log of a real job."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace

import pytest

from hpctrain.core.names import format_ranges
from hpctrain.transport.placement.check import (
    MAX_FAULTS_SHOWN,
    RankBinding,
    binding_from_table,
    describe_faults,
    describe_ports,
    find_faults,
    group_by_kind,
)
from hpctrain.transport.placement.nearest_nics import NicPorts

# Four cores a node, two GPUs.
ITEM = RankBinding("a", "srun", 0, "0", 4, 1)
TWO = replace(ITEM, local_rank=1, cores="1")
ON_GPU = replace(ITEM, gpu="G0", gpus=2)
OTHER_GPU = replace(TWO, gpu="G1", gpus=2)
ALL = replace(ITEM, cores="0-3")


def alike(count, seat):
    """Return `count` seats like `seat` with the right local ranks."""
    return [replace(seat, local_rank=n) for n in range(count)]


# seats of all ranks -> for each fault its name, its ranks, words of it
CASES = {
    "one each": ([ITEM, TWO], []),
    "a GPU each": ([ON_GPU, OTHER_GPU], []),
    "a GPU of each of two nodes": ([ON_GPU, replace(ON_GPU, host="b")], []),
    "two on a GPU": (
        [ON_GPU, replace(OTHER_GPU, gpu="G0")],
        [("GPUs shared", (0, 1), "ranks 0-1 share G0 of a, and another of its GPUs is idle")],
    ),
    "more ranks than GPUs": (
        [replace(s, cores=f"{n}", local_rank=n) for n, s in enumerate([ON_GPU, OTHER_GPU] * 2)],
        [],
    ),
    "one GPU for all": ([replace(ON_GPU, gpus=1), replace(TWO, gpu="G0", gpus=1)], []),
    "a server without a GPU": ([ITEM, replace(OTHER_GPU, gpus=1)], []),
    "all on one core": (
        alike(3, ITEM),
        [("cores shared", (0, 1, 2), "ranks 0-2 of a all run on core 0, and 3 others are idle")],
    ),
    "all on one core of one": (alike(3, replace(ITEM, offered=1)), []),
    "a core each, on two nodes": ([ITEM, replace(ITEM, host="b")], []),
    "three on two cores": (
        alike(3, replace(ITEM, cores="0-1")),
        [("cores shared", (0, 1, 2), "cores 0-1, and 2 others are idle")],
    ),
    "a socket shared": (alike(2, replace(ITEM, cores="0-1")), []),
    "more ranks than cores": (alike(6, ALL), []),
    "threads of one": (
        [ITEM, replace(TWO, blas_threads=2)],
        [("BLAS threads", (1,), "rank 1 of a: 2")],
    ),
    "threads of each": (
        [replace(ITEM, blas_threads=8), replace(TWO, blas_threads=8)],
        [("BLAS threads", (0, 1), "ranks 0-1 of a: 8 BLAS threads on 1 core each, so")],
    ),
    "threads of two sockets": (
        [
            *alike(2, replace(ALL, cores="0-1", blas_threads=2)),
            *(
                replace(s, local_rank=s.local_rank + 2)
                for s in alike(2, replace(ALL, cores="2-3", blas_threads=2))
            ),
        ],
        [
            ("BLAS threads", (0, 1), "4 BLAS threads on 2 cores, so"),
            ("BLAS threads", (2, 3), "4 BLAS threads on 2 cores, so"),
        ],
    ),
    "threads of all": (
        alike(4, replace(ALL, blas_threads=4)),
        [("BLAS threads", (0, 1, 2, 3), "16 BLAS threads on 4 cores, so they take turns")],
    ),
    "as many threads as cores": (alike(2, replace(ALL, blas_threads=2)), []),
    "a daemon's local rank": (
        [ITEM, replace(TWO, local_rank=0), replace(ITEM, host="b")],
        [("local ranks", (0, 1), "all got local rank 0 from srun (SLURM_LOCALID")],
    ),
    "and what comes of it": (
        [ON_GPU] * 2,
        [("local ranks", (0, 1), ""), ("GPUs shared", (0, 1), ""), ("cores shared", (0, 1), "")],
    ),
    "not told": ([replace(ALL, local_rank=None)] * 3, []),
}


@pytest.mark.parametrize("case", CASES)
def test_faults(case):
    seats, expected = CASES[case]
    result = find_faults(seats)
    assert [(fault.name, fault.ranks) for fault in result] == [
        (name, ranks) for name, ranks, _ in expected
    ]
    for fault, (_, _, words) in zip(result, expected, strict=True):
        assert words in fault.observed
        assert fault.remedy


FOUR = tuple(f"mlx5_{i}:1" for i in range(4))


def named(*names, nearby=FOUR[0], **rails):
    """Return a seat whose rank names these of four ports."""
    return replace(ITEM, nics=NicPorts(FOUR, (nearby,), names, **rails))


ELSEWHERE = replace(named(), host="b")
# seats of ranks on node a, which with another are a job -> faults
NICS = {
    "nobody names": ([named(), replace(named(), local_rank=1, cores="1")], []),
    "all the same": (
        [named(FOUR[0]), replace(named(FOUR[0]), local_rank=1, cores="1")],
        [("NICs shared", (0, 1), "ranks 0-1 of a all name mlx5_0:1 in UCX_NET_DEVICES, and")],
    ),
    "each its own": ([named(FOUR[0]), replace(named(FOUR[1]), local_rank=1, cores="1")], []),
    "one rank": ([named(FOUR[0])], []),
    "all name all": ([named(*FOUR), replace(named(*FOUR), local_rank=1, cores="1")], []),
    "not there": (
        [named(faults=("mlx5_9:1 is not there",))],
        [
            (
                "NICs named",
                (0,),
                "rank 0 of a: of the ports in UCX_NET_DEVICES, mlx5_9:1 is not there",
            )
        ],
    ),
    "far": (
        [named(FOUR[3], remote=True)],
        [("NICs far", (0,), "rank 0 has mlx5_3:1, and the nearest is mlx5_0:1")],
    ),
}


@pytest.mark.parametrize("case", NICS)
def test_adapters(case):
    seats, expected = NICS[case]
    result = find_faults([*seats, ELSEWHERE])
    assert [(fault.name, fault.ranks) for fault in result] == [
        (name, ranks) for name, ranks, _ in expected
    ]
    assert all(
        words in fault.observed for fault, (_, _, words) in zip(result, expected, strict=True)
    )
    assert find_faults(seats) == []  # on one node nobody needs an adapter


def test_the_line_about_adapters():
    two = [named(nearby=FOUR[1]), replace(named(FOUR[2]), local_rank=1)]
    assert describe_ports(two) == ""
    job = [*two, *(replace(seat, host="b") for seat in two), replace(ITEM, host="c")]
    assert describe_ports(job) == "NICs near local ranks, 2 nodes: 0 mlx5_1:1; 1 mlx5_2:1 (named)"
    assert describe_ports([ITEM, replace(ITEM, host="b")]) == ""
    assert describe_ports(
        [replace(seat, host=host) for host in "ab" for seat in [named()] * 3]
    ) == ("NICs near local ranks, 2 nodes: 0-2 mlx5_0:1")
    assert describe_ports([named(note="so"), ELSEWHERE]).endswith("; HPCTRAIN_NIC: so")


def test_seats_travel_as_json():
    assert binding_from_table(json.loads(json.dumps(asdict(named(FOUR[1], remote=True))))) == named(
        FOUR[1], remote=True
    )


def test_many_nodes_are_told_in_few_words():
    seats = [replace(ITEM, host=f"n{n // 2}", local_rank=n % 2) for n in range(40)]
    (kind,) = group_by_kind(find_faults(seats))
    text, remedy = describe_faults(kind)
    assert text.count("all run on core 0") == MAX_FAULTS_SHOWN
    assert text.endswith("and 16 more like this")
    assert "--cpus-per-task" in remedy


@pytest.mark.parametrize(
    "numbers, text", [([], ""), ([3], "3"), ([0, 1, 2, 8, 10, 11], "0-2,8,10-11")]
)
def test_ranges(numbers, text):
    assert format_ranges(numbers) == text


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
    """A launcher gives each rank local rank 0 and binds it to the same core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    env = {"OMP_NUM_THREADS": "3", "CORE": str(cores[0])}
    ended = start("-c", MISLED, ranks=2, env=env).finish()
    assert ended.returncode == 0, ended.stderr
    for words in (
        "ranks 0-1 of",
        "all got local rank 0",
        "all run on core",
        "6 BLAS threads on 1",
    ):
        assert ended.stderr.count(words) >= 1, ended.stderr
    assert ended.stderr.count("WARNING:hpctrain") == 1
