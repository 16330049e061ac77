"""A pipeline has the bytes of one rank with as many micro-batches: parameters, losses, outputs."""

from __future__ import annotations

from functools import cache

import pytest
from pipelines import MODELS, OPTIMIZERS, Outcome, Plan, train
from ranks import on_ranks, run_on

from hpctrain.parallel.schedules import SCHEDULES, make

#: by the number of ranks: as many as, more and fewer than the ranks; multiples for interleaved
MICRO_BATCHES = {2: 4, 3: 4, 4: 4, 5: 3, 6: 7, 7: 2, 8: 5}


@cache
def one_rank(plan: Plan) -> Outcome:
    return run_on("threads", 1, lambda world: train(world, plan))[0]


def plan_for(model: str, schedule: str, ranks: int, **options) -> Plan:
    micro_batches = ranks if schedule == "interleaved" else MICRO_BATCHES[ranks]
    stages = make(schedule, ranks, micro_batches).stages
    return Plan(model, max(4, stages), micro_batches, **options)


def equals_one_rank(ranks, plan: Plan, **pipeline) -> None:
    expected = one_rank(plan)
    for outcome in ranks(lambda world: train(world, plan, world.size, **pipeline)):
        assert outcome == expected


@pytest.mark.sample(3)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(*range(2, 9), mpi=())
def test_every_schedule_and_model(ranks, schedule, model):
    equals_one_rank(ranks, plan_for(model, schedule, ranks.size), schedule=schedule)


#: Of these a row runs over MPI in each run of the tests, of the others with `full`.
OVER_MPI = ("dropout", "tied twice")
NAMES = [pytest.param(m, marks=() if m in OVER_MPI else pytest.mark.full) for m in MODELS]


@pytest.mark.parametrize("model", NAMES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(mpi=(2, 3, 4))
def test_every_schedule_over_mpi(ranks, schedule, model):
    equals_one_rank(ranks, plan_for(model, schedule, ranks.size), schedule=schedule)


@pytest.mark.sample(2)
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@on_ranks(3, mpi=())
def test_every_optimizer(ranks, schedule, optimizer, precision):
    plan = plan_for("tied", schedule, ranks.size, optimizer=optimizer, precision=precision)
    equals_one_rank(ranks, plan, schedule=schedule)


#: (schedule, layers of each stage, ranks); a vee has both ends of a tie on rank 0
BY_HAND = {
    "vee": ("zb-v", [3, 3, 3, 3], 2),
    "vee of three ranks": ("dualpipe-v", [1, 2, 2, 2, 2, 3], 3),
    "loops": ("interleaved", [2, 1, 6, 3], 2),
    "two uses in one stage": ("1f1b", [1, 8, 3], 3),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_a_cut_by_hand(case):
    schedule, counts, size = BY_HAND[case]
    plan = Plan("tied twice", layers=8, micro_batches=4 if size == 2 else 3)
    outcomes = run_on(
        "threads", size, lambda w: train(w, plan, size, schedule=schedule, balance=counts)
    )
    assert outcomes == [one_rank(plan)] * size


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@on_ranks(2, mpi=())
def test_a_measured_cut(ranks, schedule):
    """Which layers a rank has then depends on the machine, the bytes do not."""
    equals_one_rank(ranks, Plan("tied", 6, 4), schedule=schedule, balance="measured")
