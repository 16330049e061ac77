"""Errors planted in a pipeline: each is refused, or changes the bytes that are compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pipelines import Plan, samples_of, train, trainer_of
from ranks import on_ranks, run_on

from hpctrain import nn
from hpctrain.core.errors import TransportError, UsageError
from hpctrain.gradients.replica import Batch, ignore_ready
from hpctrain.nn.part import GradientSums
from hpctrain.parallel.pipeline import replica as replicas
from hpctrain.parallel.pipeline.execution import TrainingStep
from hpctrain.parallel.pipeline.tied_weights import TiedWeights
from hpctrain.parallel.schedules.actions import PipelineSchedule, action_lists
from hpctrain.parallel.schedules.check import check
from hpctrain.parallel.schedules.messages import source

PLAN = Plan("tied twice", 8, 4)


def swapped(schedule: PipelineSchedule, rank: int) -> PipelineSchedule:
    """Return the schedule with the forward passes of two micro-batches of `rank` swapped."""
    lists = [list(actions) for actions in schedule.actions]
    first, second = [i for i, action in enumerate(lists[rank]) if action.op == "F"][:2]
    lists[rank][first], lists[rank][second] = lists[rank][second], lists[rank][first]
    return replace(schedule, actions=action_lists(lists))


def one_gradient(trainer):
    x, y = samples_of(trainer.replica.model).rows(np.arange(12))
    key = nn.Key(0, 0, 0, samples=12)
    return trainer.replica.gradient(Batch.of(x, y), 1 / 12, key, ignore_ready)


@on_ranks(2, mpi=())
def test_two_micro_batches_swapped_in_the_list_of_a_rank_are_refused(ranks):
    def body(world):
        trainer = trainer_of(world, PLAN, 2, schedule="gpipe", balance="even")
        trainer.replica.micro_batches = 4
        schedule = swapped(trainer.replica.schedule, 0)
        with pytest.raises(UsageError, match="takes micro-batches in order"):
            check(schedule)
        if world.rank == 0:  # the other rank has the list that passed its check
            trainer.replica.schedule = schedule
        one_gradient(trainer)

    expected, actual = (f"activation of micro-batch {i} for stage 1" for i in (0, 1))
    message = f"rank 1 of the pipeline: expected the {expected} from rank 0, seen the {actual}"
    with pytest.raises(TransportError, match=message):
        ranks(body)


@on_ranks(2, mpi=())
def test_receives_in_the_order_of_need_are_refused(ranks, monkeypatch):
    def needed(schedule, rank):
        arrivals: dict[int, tuple] = {}
        for action in schedule.actions[rank]:
            message = source(schedule, action)
            if message is not None and message[0] != rank:
                arrivals[message[0]] = (*arrivals.get(message[0], ()), message[1])
        return arrivals

    monkeypatch.setattr(replicas, "inbound", needed)

    def body(world):
        trainer = trainer_of(world, PLAN, 2, schedule="zb-v", balance="even")
        trainer.replica.micro_batches = 4
        one_gradient(trainer)

    with pytest.raises(TransportError, match=r"rank 1 of the pipeline: expected the .*, seen"):
        ranks(body)


def a_scale_twice(monkeypatch):
    backpropagate = TrainingStep._backpropagate

    def scaled(self, action, dy, later):
        dy = dy * self._scale if action.stage == 0 else dy
        return backpropagate(self, action, dy, later)

    monkeypatch.setattr(TrainingStep, "_backpropagate", scaled)


def a_dropped_accumulation(monkeypatch):
    add = GradientSums.add

    def forgetful(self, layer, g, micro_batch):
        if (layer.number, micro_batch) == (5, 2):
            g = {own: np.zeros_like(x) for own, x in g.items()}
        add(self, layer, g, micro_batch)

    monkeypatch.setattr(GradientSums, "add", forgetful)


def a_tied_gradient_twice(monkeypatch):
    finish = GradientSums.finish
    monkeypatch.setattr(
        GradientSums, "finish", lambda self, name, foreign: finish(self, name, [*foreign] * 2)
    )


def old_values_of_ties(monkeypatch):
    update = TiedWeights.update_copies
    monkeypatch.setattr(
        TiedWeights, "update_copies",
        lambda self, params: update(self, {name: x.copy() * 1.01 for name, x in params.items()}),
    )  # fmt: skip


PLANTED = [a_scale_twice, a_dropped_accumulation, a_tied_gradient_twice, old_values_of_ties]


@pytest.mark.parametrize("plant", PLANTED)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_planted_error_changes_the_bytes(plant, schedule, monkeypatch):
    (expected,) = run_on("threads", 1, lambda world: train(world, PLAN))
    pipelined = [run_on("threads", 2, lambda w: train(w, PLAN, 2, schedule=schedule))]
    plant(monkeypatch)
    pipelined.append(run_on("threads", 2, lambda w: train(w, PLAN, 2, schedule=schedule)))
    assert pipelined[0] == [expected] * 2
    assert all(outcome.sha256 != expected.sha256 for outcome in pipelined[1])
