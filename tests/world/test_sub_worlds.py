"""Sub-worlds: of a World's ranks by colour or by number, and of a user's communicator."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from ranks import on_ranks, run_on

import hpctrain as ht
from hpctrain.core.errors import UsageError
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.watch import WatchRecord
from hpctrain.world import over_threads, watched

X = np.random.default_rng(0).standard_normal((48, 6)).astype(np.float32)
Y = np.arange(48) % 3
ORDERED = ht.engines.AllReduce(reduction="ordered")  # equal bytes on any number of ranks
ENGINES = {"allreduce": ORDERED, "ps-sync": ht.engines.PsSync()}


def train(world: ht.World, width: int, engine: object = ORDERED) -> str:
    """Return the hash of a trained model with `width` hidden units; collective."""
    model = ht.nn.Model([ht.nn.Linear(width), ht.nn.ReLU(), ht.nn.Linear(3)], 6)
    with ht.Trainer(model, "adamw", engine, world=world) as trainer:
        return trainer.fit((X, Y), epochs=2, batch=16)["params_sha256"]


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(4, 5, mpi=(4,))
def test_two_sub_worlds_train_different_models_at_once(ranks, engine):
    widths = 8, 12
    sizes = [len(range(color, ranks.size, 2)) for color in (0, 1)]

    alone = [
        run_on("threads", size, lambda world, width=width: train(world, width, ENGINES[engine]))[0]
        for size, width in zip(sizes, widths, strict=True)
    ]

    def body(world):
        color = world.rank % 2
        sub_world = world.split(color)
        assert (sub_world.size, sub_world.rank) == (sizes[color], world.rank // 2)
        assert train(sub_world, widths[color], ENGINES[engine]) == alone[color]

    ranks(body)


@on_ranks(1, 3, 5, mpi=(3, 5))
def test_a_subset_is_made_by_its_ranks_alone(ranks):
    def body(world):
        low = range(world.size // 2 + 1)
        own = low if world.rank in low else range(world.size - 1, low[-1], -1)
        for repetition in range(3):  # the same ranks and the same tag
            if (world.rank in low) or repetition:  # the others come late
                sub_world = world.subset(own)
                assert sub_world.rank == list(own).index(world.rank)
                texts = [str(rank) for rank in own]
                assert sub_world.gather(str(world.rank)) == texts
                total = np.full(5, world.rank)
                ht.allreduce(total, world=sub_world)
                assert (total == sum(own)).all()
        world.barrier()

    ranks(body)


@on_ranks(4, mpi=(4,))
def test_subsets_that_overlap_have_messages_of_their_own(ranks):
    def body(world):
        pairs = [world.subset((rank, (rank + 1) % 4), tag=rank)
                 for rank in range(4) if world.rank in (rank, (rank + 1) % 4)]  # fmt: skip
        for pair in pairs:
            x = np.array([world.rank, 1.0])
            ht.broadcast(x, root=1, world=pair)
            ht.allreduce(x, world=pair)
            assert x[1] == 2

    ranks(body)


# Hosts of the ranks, their colours -> hosts, local ranks and nodes of the sub-world of colour 0
SPLITS = {
    "one node": ("aaaa", "0101", "aa", [0, 1], 1),
    "one of each node": ("aabb", "0101", "ab", [0, 0], 2),
    "nodes of different size": ("aaabb", "01000", "aabb", [0, 1, 0, 1], 2),
}


@pytest.mark.parametrize("case", SPLITS)
def test_a_sub_world_has_nodes_of_its_own(case):
    hosts, colors, expected, local_ranks, nodes = SPLITS[case]

    def body(link):
        world = over_threads(link, hosts)
        sub_world = world.split(int(colors[link.rank]))
        if colors[link.rank] == "0":
            assert sub_world.hosts == tuple(expected)
            assert sub_world.local_rank == local_ranks[sub_world.rank]
            assert (len(sub_world.main.nodes), sub_world.across.size) == (nodes, nodes)
            assert sub_world.zeros(3).shape == (3,)

    run_ranks(len(hosts), body)


@pytest.mark.parametrize("ranks", [(0, 0), (1,), (0, 2), (0, -1), ()])
def test_a_subset_of_other_ranks_is_refused(ranks):
    def body(world):
        if world.rank == 0:
            with pytest.raises(UsageError, match=r"different ranks of 0 to 1, .* rank 0 called it"):
                world.subset(ranks)

    run_on("threads", 2, body)


@on_ranks(mpi=(2,))
def test_waits_of_a_sub_world_are_recorded_with_those_of_its_parent(ranks, tmp_path):
    def body(world):
        world.threads.record_in(WatchRecord(world.rank, world.size))
        directory = world.gather(str(tmp_path))[0]
        with watched(world, Path(directory), timeout_s=60):
            sub_world = world.split(0)
            assert sub_world.link.endpoint.waits.entry is world.threads.record.entry("main")
        assert (
            sub_world.link.endpoint.waits.entry
            is sub_world.node.endpoint.waits.entry
            is world.link.endpoint.waits.entry
        )
        sub_world.barrier()

    ranks(body)


SOME_RANKS = """
from mpi4py import MPI
import numpy as np
import hpctrain as ht

everyone = MPI.COMM_WORLD
members = everyone.rank in (0, 2, 4)
comm = everyone.Split(0 if members else MPI.UNDEFINED)
if members:
    world = ht.init(comm=comm)
    assert (world.size, world.rank) == (3, everyone.rank // 2)
    assert ht.init() is ht.init(comm=comm) is ht.init(comm=comm.Dup()) is world
    model = ht.nn.Model([ht.nn.Linear(8), ht.nn.ReLU(), ht.nn.Linear(3)], 6)
    x = np.random.default_rng(0).standard_normal((48, 6)).astype(np.float32)
    trainer = ht.Trainer(model, "adamw", ht.engines.AllReduce(reduction="ordered"))
    summary = trainer.fit((x, np.arange(48) % 3), epochs=2, batch=16)
    world.must_agree(summary["params_sha256"], "the model")
    if world.rank == 0:
        print(summary["params_sha256"], flush=True)
    comm.Free()
total = everyone.allreduce(1)
assert total == 5, total
"""


@pytest.mark.processes
@pytest.mark.either
def test_three_of_five_ranks_train_on_their_own_communicator(start):
    ended = start("-c", SOME_RANKS, ranks=5).finish(timeout=120)
    assert ended.returncode == 0, ended.stderr
    alone = run_on("threads", 1, lambda world: train(world, 8))[0]
    assert ended.stdout.split() == [alone]


IMPORTS = """
import time
from mpi4py import MPI
import hpctrain as ht
all = MPI.COMM_WORLD
"""
# What a program passes to init -> what the job reports
WRONG = {
    "another communicator": ("ht.init(); ht.init(comm=MPI.COMM_SELF)",
                             r"init\(comm=...\) has 1 ranks, but the World .* of 2 others"),
    "another order": ("ht.init(); ht.init(comm=all.Split(0, -all.rank))",
                      r"init\(comm=...\) has 2 ranks, but .* in another order"),
    "a rank outside": ("ht.init(comm=all.Split(0 if all.rank == 0 else MPI.UNDEFINED))\n"
                       "time.sleep(60)",
                       r"hpctrain: rank 1 on \S+: init.* not COMM_NULL: other ranks do"),
    "between groups": ("ht.init(comm=all.Split(all.rank).Create_intercomm(0, all, 1 - all.rank))",
                       "not an intercommunicator"),
    "no communicator": ("ht.init(comm=1)", "takes an intracommunicator of mpi4py, not 1"),
    "no MPI": ("MPI.Finalize(); ht.init(comm=all)", "but MPI is finalized"),
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.processes
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_communicator_ends_the_job_with_its_reason(start, case):
    program, message = WRONG[case]
    ended = start("-c", IMPORTS + program, ranks=2).finish(timeout=60)
    assert ended.returncode == UsageError.exit_code, ended.stderr
    assert re.search(message, ended.stderr), ended.stderr


def test_an_error_of_a_sub_world_is_that_of_the_job(monkeypatch):
    reports = []
    monkeypatch.setattr("hpctrain.transport.abort.report", lambda *args: reports.append(args[1:]))

    def body(world):
        sub_world = world.split(world.rank // 2)
        if world.rank == 3:
            sub_world.abort(ValueError("of rank 1 of 2"))

    hosts = run_on("threads", 4, lambda world: (body(world), world.host)[1])
    assert reports == [(f"rank 3 on {hosts[3]}", 3, 4)]
