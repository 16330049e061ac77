"""Messages, live tapes and planes of a pipeline are as many as its list of actions says."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from pipelines import OwnScale, Plan, fit, on_grids, samples_of, trainer_of
from ranks import on_ranks, run_on

from hpctrain import data, nn, optim
from hpctrain.gradients.replica import Batch, split_batch
from hpctrain.parallel import MeshOptions, PipelineOptions
from hpctrain.parallel.pipeline.stage_link import message_bytes
from hpctrain.parallel.schedules import SCHEDULES
from hpctrain.parallel.schedules.check import check
from hpctrain.parallel.schedules.messages import outbound
from hpctrain.training.trainer import Trainer

M = 4  # micro-batches


def sent_per_list(replica, rank: int, batch: int) -> np.ndarray:
    """Return messages and bytes of a step of `batch` samples, as the list of actions has them."""
    schedule, plan, model = replica.schedule, replica.plan, replica.model
    item = replica.arena.param.itemsize
    pieces = split_batch(Batch.of(np.zeros(batch), np.zeros(batch)), M)
    sizes = [piece.n for piece, _ in pieces]
    shapes = [plan.boundary_shape(model, i) for i in range(schedule.stages - 1)]
    result = np.zeros(2, int)
    for _, message in outbound(schedule, rank):
        values = sizes[message.micro] * prod(shapes[message.boundary])
        result += (1, message_bytes(values * item))
    if len({*sizes}) == 1:
        boundary_bytes = [message_bytes(sizes[0] * prod(shape) * item) for shape in shapes]
        assert (*result,) == check(schedule, boundary_bytes).sent(rank)
    return result


def sent_for_ties(replica, rank: int) -> np.ndarray:
    """Return messages and bytes of a step: values to each other rank, a sum from each other use."""
    result = np.zeros(2, int)
    for name, owner, uses in replica.plan.shared_tensors(replica.model):
        nbytes = prod(replica.model.parameters[name].shape) * replica.arena.param.itemsize
        ranks = [replica.plan.placement[stage] for _, stage in uses]
        home = replica.plan.placement[owner]
        if rank == home:
            result += np.multiply(len({*ranks} - {home}), (1, nbytes))
        else:
            result += np.multiply(ranks.count(rank), (1, nbytes))
    return result


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", ["mlp", "tied twice"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(2, 4, mpi=(4,))
def test_messages_and_tapes_are_those_of_the_list(ranks, schedule, model):
    """Steps of 12, 12 and 3 samples: in the last one a micro-batch has none."""

    def body(world):
        plan = Plan(model, 2 * world.size, M, steps=3)
        with trainer_of(world, plan, world.size, schedule=schedule, balance="even") as trainer:
            link, replica = trainer.mesh.grid.stages, trainer.replica
            before = np.array(
                [link.endpoint.traffic.messages_sent, link.endpoint.traffic.bytes_sent]
            )
            fit(trainer, plan)
            sent = (
                np.array([link.endpoint.traffic.messages_sent, link.endpoint.traffic.bytes_sent])
                - before
            )
            expected = sum(sent_per_list(replica, world.rank, n) for n in (12, 12, 3))
            expected = expected + 3 * sent_for_ties(replica, world.rank)
            assert (*sent,) == (*expected,)
            peak = check(replica.schedule).peak_activations[world.rank]
            assert replica.peak_tapes == peak

    ranks(body)


def wide(stages: int) -> nn.Model:
    """Return a model whose activations are much larger than its parameters: 512 KiB."""
    own = {f"own{i}": OwnScale() for i in range(stages)}
    return nn.Model({"flat": nn.Flatten(), "in": nn.Linear(4096), **own, "out": nn.Linear(10)},
                    (8, 8))  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@on_grids((2, 2), (1, 4), mpi=((2, 2),))
def test_large_messages_do_not_deadlock(ranks, grid, schedule):
    """Beyond the eager limit of every MPI a send waits for its receive."""
    x, y = samples_of(wide(2), 256).rows(np.arange(256))

    def body(world):
        mesh = MeshOptions(pipe=grid[1])
        pipeline = PipelineOptions(schedule=schedule, balance="even")
        model = wide(2 * grid[1])
        with Trainer(model, optim.sgd(0.01), world=world, mesh=mesh, pipeline=pipeline) as trainer:
            return trainer.fit(data.Dataset(x, y), steps=1, batch=256, micro_batches=4)

    assert len({summary["params_sha256"] for summary in ranks(body)}) <= 1


def test_a_rank_has_its_share_of_the_planes():
    """8 million parameters in 34 layers; parameters, gradients and momentum.

    Planes begin at a block of the whole plane, so that up to 65,535 of their numbers are not used.
    """
    model = nn.MlpOptions(widths=[64, *[512] * 33, 10]).build((8, 8), 10)

    def planes(world):
        mesh = MeshOptions(pipe=world.size)
        pipeline = PipelineOptions(balance="even") if world.size > 1 else PipelineOptions()
        with Trainer(model, optim.sgd(0.1, 0.9), world=world, mesh=mesh,
                     pipeline=pipeline) as trainer:  # fmt: skip
            state = sum(len(piece.array) for piece in trainer.engine.state())
            arena = trainer.replica.arena
            return np.array([arena.param.size, arena.grad.size, state])

    (whole,) = run_on("threads", 1, planes)
    assert whole[0] > 8_000_000
    for size in (2, 4, 8):
        for own in run_on("threads", size, planes):
            assert (own <= 1.1 / size * whole).all(), (size, own / whole)
