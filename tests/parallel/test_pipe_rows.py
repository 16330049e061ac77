"""Parameter servers, elastic averaging and gossip across pipelines: a row of ranks is one worker.

Where the order of events is free, a run on a grid leaves the log of one order. Ranks that hold
whole models repeat that log: they must end with the same bytes, or the layers of a replica have
seen different orders.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from pipelines import BATCH, Outcome, Plan, fit, on_grids, samples_of, train, trainer_of
from ranks import run_on

from hpctrain import engines, nn
from hpctrain.core.errors import TrainingError
from hpctrain.engines import Flags, Task
from hpctrain.engines.gossip import pairs
from hpctrain.engines.gossip.turns import TurnLock
from hpctrain.engines.parameter_server.shard import Shard
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.parallel.pipeline.replica import PipelineReplica
from hpctrain.training.run_options import FitOptions

#: Engines whose order of events is fixed.
TOGETHER: dict[str, Any] = {
    "1 server": engines.PsSync(),
    "1 colocated": engines.PsSync(placement="colocated"),
    "2 colocated": engines.PsSync(placement="colocated", servers=2),
    "staleness 0": engines.PsAsync(staleness=0),
    "ring": engines.Gossip(graph="ring"),
    "exponential": engines.Gossip(graph="exponential"),
}
#: Engines that decide on the order of events.
FREE: dict[str, Any] = {
    "ps-async": engines.PsAsync(),
    "2 servers": engines.PsAsync(servers=2),
    "bounded": engines.PsAsync(staleness=1, placement="colocated", servers=2),
    "softsync": engines.PsAsync(softsync=1, placement="colocated"),
    "compensated": engines.PsAsync(delay_compensation=0.5),
    "seldom": engines.PsAsync(push_every=2, pull_every=4),
    "backup": engines.PsSync(backup_workers=1),
    "easgd": engines.Easgd(period=2),
    "easgd, 2 colocated": engines.Easgd(period=3, placement="colocated", servers=2),
    "gossip": engines.Gossip(),
}
OPTIMIZERS = {"mlp": "adamw", "tied twice": "lamb"}


@cache
def on_data_axis(plan: Plan, size: int) -> Outcome:
    """Return the outcome of `size` ranks that each hold a whole replica."""
    return run_on("threads", size, lambda world: train(world, plan))[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize("model", ["mlp", "tied twice"])
@pytest.mark.parametrize("engine", TOGETHER)
@on_grids((3, 2), (2, 3), (4, 2), mpi=((2, 2),))
def test_a_fixed_order_has_the_bytes_of_the_data_axis(ranks, grid, engine, model):
    plan = Plan(model, 8, micro_batches=4, engine=TOGETHER[engine], steps=7)
    expected = on_data_axis(plan, grid[0])
    for rank, outcome in ranks(lambda world: (world.rank, train(world, plan, grid[1]))):
        assert outcome[:-1] == expected[:-1]
        if rank < grid[1]:  # a server's own replica is not trained
            assert outcome == expected


@pytest.fixture
def jitter(monkeypatch):
    """Delay gradients and updates at random, on each rank by itself."""

    def delay(function):
        def delayed(*args):
            time.sleep(random.random() * 4e-3)
            return function(*args)

        return delayed

    monkeypatch.setattr(PipelineReplica, "gradient", delay(PipelineReplica.gradient))
    monkeypatch.setattr(ModelReplica, "gradient", delay(ModelReplica.gradient))
    monkeypatch.setattr(Shard, "apply", delay(Shard.apply))


def free_plan(engine: str, model: str = "mlp", **options) -> Plan:
    return Plan(
        model, 8, engine=FREE[engine], optimizer=OPTIMIZERS[model],
        **{"micro_batches": 2, "steps": 9, **options},
    )  # fmt: skip


def logged(world, plan: Plan, pipe: int, out, **options) -> dict[str, Any]:
    """Return the summary of a run in folder `out`."""
    pipeline = {"balance": "even"} if pipe > 1 else {}
    with trainer_of(world, plan, pipe, **pipeline) as trainer:
        return trainer.fit(
            samples_of(trainer.replica.model),
            steps=plan.steps,
            batch=BATCH,
            micro_batches=plan.micro_batches,
            out=out,
            options=FitOptions(interval_steps=3, not_finite=plan.not_finite),
            **options,
        )


def on_grid(plan: Plan, grid: tuple[int, int], out, **options) -> dict[str, Any]:
    """Return the summary that all ranks of a grid of threads have; with pipe 1 each is whole."""
    results = run_on(
        "threads", grid[0] * grid[1], lambda w: logged(w, plan, grid[1], out, **options)
    )
    assert len({result["params_sha256"] for result in results}) == 1
    return results[0]


SAME = ("params_sha256", "train_loss", "staleness_mean", "staleness_max", "clock_gap_max",
        "dropped_gradients", "staleness_histogram")  # fmt: skip


def same(summary) -> dict[str, Any]:
    return {key: summary[key] for key in SAME if key in summary}


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", ["mlp", "tied twice"])
@pytest.mark.parametrize("engine", FREE)
@pytest.mark.parametrize("grid", [(4, 2), (3, 3)], ids=["4x2", "3x3"])
def test_all_layers_see_one_order(tmp_path, jitter, grid, engine, model):
    """The log of the grid, repeated by ranks with whole models, ends with the same bytes."""
    plan = free_plan(engine, model)
    first = on_grid(plan, grid, tmp_path / "run")
    again = on_grid(plan, grid, tmp_path / "again", replay=tmp_path / "run")
    assert same(again) == same(first)
    alone = on_grid(plan, (grid[0], 1), tmp_path / "alone", replay=tmp_path / "run")
    assert same(alone) == same(first)


@pytest.mark.full
@pytest.mark.parametrize("engine", FREE)
def test_twenty_replays_of_twenty(tmp_path, jitter, engine):
    plan = free_plan(engine)
    first = on_grid(plan, (4, 2), tmp_path / "run")["params_sha256"]
    replays = [on_grid(plan, (4, 2), tmp_path / f"{i}", replay=tmp_path / "run") for i in range(20)]
    assert [item["params_sha256"] for item in replays] == [first] * 20


@pytest.mark.parametrize("engine", ["ps-async", "bounded", "easgd, 2 colocated", "gossip"])
@on_grids(mpi=((2, 2),))
def test_over_mpi_a_replay_has_the_same_bytes(ranks, grid, engine, tmp_path):
    def body(world):
        run = tmp_path if world.rank == 0 else ""
        run = type(tmp_path)(world.gather(str(run))[0])
        plan = free_plan(engine)
        first = logged(world, plan, grid[1], run / "run")
        again = logged(world, plan, grid[1], run / "again", replay=run / "run")
        assert same(again) == same(first)
        return True

    assert all(ranks(body))


def test_turns_that_each_layer_takes_by_itself_are_noticed(tmp_path, jitter, monkeypatch):
    """A planted error: the passive ranks of pipe rank 1 average in an order of their own."""
    monkeypatch.setattr(pairs, "make_turn_lock", lambda link, active, order: TurnLock(order))
    plan = free_plan("gossip", steps=24)
    first = on_grid(plan, (4, 2), tmp_path / "run")
    alone = on_grid(plan, (4, 1), tmp_path / "alone", replay=tmp_path / "run")
    assert same(alone) != same(first)


@pytest.mark.parametrize("pipe", [2, 3])
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_one_asynchronous_worker_equals_one_rank(tmp_path, placement, pipe):
    plan = Plan("mlp", 8, engine=engines.PsAsync(placement=placement), steps=9)
    expected = on_data_axis(replace(plan, engine=engines.Single()), 1).sha256
    data = 2 if placement == "dedicated" else 1
    assert on_grid(plan, (data, pipe), tmp_path / "run")["params_sha256"] == expected


class Script:
    """The work of a rank that requests a stop when it is asked a tenth time."""

    max_drops = 0

    def __init__(self, trainer, stops: bool):
        self._samples, self._stops, self._count = samples_of(trainer.replica.model), stops, 0

    def task(self, step):
        return Task(Batch.of(*self._samples.rows(np.arange(4))), 1 / 4, nn.Key(0, step, 0))

    def record(self, step, sums):
        pass

    def flags(self):
        self._count += 1
        return Flags(stop=1) if self._stops and self._count >= 10 else Flags()


STOPPED = {**FREE, "ps-sync": engines.PsSync(), "ring": engines.Gossip(graph="ring")}


@pytest.mark.sample(3)
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("engine", STOPPED)
def test_a_request_to_stop_on_any_rank_of_a_worker_stops_all(engine, rank):
    """Ranks 0 to 3 are two rows of two; behind them there may be servers."""
    options = STOPPED[engine]
    dedicated = getattr(options, "servers", 0) * (getattr(options, "placement", "") == "dedicated")
    size = 2 * (2 + dedicated)

    def stopped(world):
        with trainer_of(world, Plan("mlp", 4, engine=options), 2, balance="even") as trainer:
            trainer.replica.micro_batches = 2
            return trainer.engine.train(Script(trainer, world.rank == rank), 0, 4000)

    results = run_on("threads", size, stopped)
    assert len(set(results)) == 1
    step, flags = results[0]
    assert 0 < step < 4000
    assert flags.stop


BAD_STEP, BAD_WORKER = 3, 1


def plant(monkeypatch, pipe_rank: int, steps: range) -> None:
    """Let worker 1 compute a gradient that is not finite at `steps`, on one rank of its row."""

    def planted(good, is_bad):
        def gradient(self, batch, scale, key, on_ready):
            grads = self.arena.views(self.arena.grad)
            is_planted = key.step in steps and key.first > 0 and is_bad(self)  # not worker 0

            def plant_when_ready(name):
                if is_planted:
                    grads[name].flat[0] = np.nan
                on_ready(name)

            return good(self, batch, scale, key, plant_when_ready)

        return gradient

    on_rank = planted(PipelineReplica.gradient, lambda self: self._pipe.rank == pipe_rank)
    monkeypatch.setattr(PipelineReplica, "gradient", on_rank)
    on_all = planted(ModelReplica.gradient, lambda self: True)
    monkeypatch.setattr(ModelReplica, "gradient", on_all)


APART = {
    "ps-async": engines.PsAsync(),
    "seldom": engines.PsAsync(push_every=2, pull_every=2),
    "easgd": engines.Easgd(period=2, placement="colocated"),
    "gossip": engines.Gossip(),
    "ring": engines.Gossip(graph="ring"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("pipe_rank", [0, 1])
@pytest.mark.parametrize("engine", APART)
def test_a_gradient_that_is_not_finite_on_one_rank_is_dropped_by_its_row(
    tmp_path, monkeypatch, engine, pipe_rank
):
    plant(monkeypatch, pipe_rank, range(BAD_STEP, BAD_STEP + 1))
    plan = Plan("mlp", 4, 2, engine=APART[engine], steps=9, not_finite="skip")
    data = 3 if engine in ("ps-async", "seldom") else 2  # two workers
    first = on_grid(plan, (data, 2), tmp_path / "run")
    assert first["dropped_gradients"] == getattr(plan.engine, "push_every", 1)
    replay = None if engine == "ring" else tmp_path / "run"
    alone = on_grid(plan, (data, 1), tmp_path / "alone", replay=replay)
    assert same(alone) == same(first)


TOLD = {**APART, "ps-sync": engines.PsSync(), "backup": engines.PsSync(backup_workers=1)}


@pytest.mark.sample(2)
@pytest.mark.parametrize("pipe_rank", [0, 1])
@pytest.mark.parametrize("engine", TOLD)
def test_the_rank_whose_gradient_is_not_finite_is_named(monkeypatch, engine, pipe_rank):
    plant(monkeypatch, pipe_rank, range(BAD_STEP, 1000))
    plan = Plan("mlp", 4, 2, engine=TOLD[engine], steps=40)
    data = 3 if "ps" in engine or engine in ("seldom", "backup") else 2
    message = rf"gradient of '.*' is not finite at step \d+ on rank {2 + pipe_rank} "

    def body(world):
        with trainer_of(world, plan, 2, balance="even") as trainer:
            with pytest.raises(TrainingError, match=message):
                fit(trainer, plan)
            return bool(np.isfinite(trainer.replica.arena.param).all())

    assert all(run_on("threads", 2 * data, body))


@pytest.mark.sample(1)
@pytest.mark.parametrize("engine", ["1 server", "2 colocated", "one asynchronous"])
def test_a_run_goes_on_on_another_grid(tmp_path, engine):
    options = TOGETHER.get(engine, engines.PsAsync())
    data = 2 if engine == "one asynchronous" else 3
    plan = Plan("tied twice", 8, engine=options, steps=9)
    expected = on_data_axis(plan, data).sha256
    for steps, pipe in ((2, 2), (5, 1), (7, 3), (9, 2)):
        result = on_grid(replace(plan, steps=steps), (data, pipe), tmp_path / "run",
                         resume=steps > 2)  # fmt: skip
    assert result["params_sha256"] == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize("engine", ["ps-async", "easgd", "gossip"])
def test_clocks_and_counts_go_on_on_another_grid(tmp_path, jitter, engine):
    plan, workers = free_plan(engine), 3 if engine == "gossip" else 2
    for steps, pipe in ((3, 2), (6, 1), (9, 3)):
        summary = on_grid(replace(plan, steps=steps), (3, pipe), tmp_path / "run",
                          resume=steps > 3)  # fmt: skip
    if engine == "ps-async":
        counts = json.loads((tmp_path / "run/summary.json").read_text())["staleness_histogram"]
        assert sum(counts.values()) == workers * 9
    assert summary["steps"] == 9
    for pipe in (1, 2):
        again = on_grid(plan, (3, pipe), tmp_path / f"{pipe}", replay=tmp_path / "run")
        assert again["params_sha256"] == summary["params_sha256"]
