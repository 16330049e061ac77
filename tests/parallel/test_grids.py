"""Data x pipe: with ordered sums the bytes of one rank, with any engine those of the data axis."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from pipelines import Outcome, Plan, on_grids, train
from ranks import run_on

from hpctrain import engines

GRIDS = tuple((n // pipe, pipe) for n in range(2, 9) for pipe in range(1, 9) if n % pipe == 0)
ORDERED = {
    "ordered": engines.AllReduce(reduction="ordered", blocks=8),
    "sharded": engines.AllReduce(reduction="ordered", blocks=8, shard_optimizer=True),
    "overlap": engines.AllReduce(reduction="ordered", overlap="always", bucket_bytes=1024),
}
#: model: (its number of layers, the schedule that is run with it)
SPLIT = {
    "dropout": (16, "zb-v"),
    "tied twice": (10, "1f1b"),
    "mlp": (16, "dualpipe-v"),
    "recompute": (8, "zb-h1"),
}
WAYS = ["ordered", "sharded", pytest.param("overlap", marks=pytest.mark.full)]
MODELS = [pytest.param(m, marks=() if m in (*SPLIT,)[:2] else pytest.mark.full) for m in SPLIT]


@cache
def on_data_axis(plan: Plan, size: int) -> Outcome:
    """Return the outcome of `size` ranks that each hold a whole replica."""
    return run_on("threads", size, lambda world: train(world, plan))[0]


@pytest.mark.sample(4)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", WAYS)
@on_grids(*GRIDS)
def test_ordered_sums_give_the_bytes_of_one_rank(ranks, grid, engine, model):
    has_the_bytes_of_one_rank(ranks, grid, engine, model)


def has_the_bytes_of_one_rank(ranks, grid, engine, model):
    layers, schedule = SPLIT[model]
    plan = Plan(model, layers, micro_batches=2, engine=ORDERED[engine])
    expected = on_data_axis(replace(plan, engine=ORDERED["ordered"]), 1)
    pipeline = {"schedule": schedule} if grid[1] > 1 else {}
    for outcome in ranks(lambda world: train(world, plan, grid[1], **pipeline)):
        assert outcome == expected


#: The order of sums over two workers is free of choice; what they hold apart has to be the same.
ENGINES = {
    "ring": engines.AllReduce(algorithm="ring"),
    "auto": engines.AllReduce(),
    "overlap": engines.AllReduce(overlap="always", bucket_bytes=256),
    "shards": engines.AllReduce(shard_optimizer=True),
    "local-sgd": engines.LocalSgd(period=2),
    "outer": engines.LocalSgd(period=2, outer="nesterov"),
    "outer, momentum averaged": engines.LocalSgd(period=3, outer="nesterov", momentum="averaged"),
    "delay": engines.LocalSgd(period=3, delay=2),
    "start after": engines.LocalSgd(period=2, start_after=3),
    "momentum averaged": engines.LocalSgd(period=2, momentum="averaged"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", ["mlp", "tied twice"])
@pytest.mark.parametrize("engine", ENGINES)
@on_grids((2, 2), (2, 3))
def test_engines_train_as_on_the_data_axis_alone(ranks, grid, engine, model):
    trains_as_on_the_data_axis(ranks, grid, engine, model)


def trains_as_on_the_data_axis(ranks, grid, engine, model):
    plan = Plan(model, 8, micro_batches=4, engine=ENGINES[engine], steps=7)
    expected = on_data_axis(plan, grid[0])
    for outcome in ranks(lambda world: train(world, plan, grid[1], schedule="zb-v")):
        assert outcome == expected


#: Of these a row runs over MPI in each run of the tests, of the others with `full`.
OVER_MPI = ("overlap", "shards", "outer", "delay")
NAMES = [pytest.param(n, marks=() if n in OVER_MPI else pytest.mark.full) for n in ENGINES]


@pytest.mark.parametrize("engine", NAMES)
@on_grids(mpi=((2, 2),))
def test_engines_over_mpi(ranks, grid, engine):
    trains_as_on_the_data_axis(ranks, grid, engine, "tied twice")


@pytest.mark.parametrize("engine", ORDERED)
@on_grids(mpi=((2, 2),))
def test_ordered_sums_over_mpi(ranks, grid, engine):
    has_the_bytes_of_one_rank(ranks, grid, engine, "dropout")
