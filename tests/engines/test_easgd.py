"""Elastic averaging against the equations of its paper, in NumPy, in the order of the log."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from quadratic import LENGTH, Quadratic, Targets, target
from ranks import on_ranks, run_on
from uneven_workers import (
    MODELS,
    fit,
    must_continue_from,
    must_replay_the_same_bytes,
    must_report_a_nan,
    plant_nan,
)

from hpctrain import optim
from hpctrain.core.errors import UsageError
from hpctrain.engines import Easgd, Flags, Gossip
from hpctrain.engines.parameter_server import server as server_side
from hpctrain.engines.parameter_server import shard
from hpctrain.engines.parameter_server.coordinator import Event
from hpctrain.engines.parameter_server.shard import GradientAction
from hpctrain.training import recipe
from hpctrain.training.run_options import CheckpointOptions

RATE, MOMENTUM = 0.1, 0.9


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Cut finely, or these small models would be one shard and one slice."""
    monkeypatch.setattr(shard, "BLOCK_ELEMENTS", 512)
    monkeypatch.setattr(shard, "SEGMENT_BYTES", 4096)


#: On P ranks; the last two are EAMSGD.
WAYS = {
    "in each step": lambda p: Easgd(period=1),
    "seldom": lambda p: Easgd(period=4, moving_rate=0.3),
    "2 servers": lambda p: Easgd(period=3, servers=2),
    "colocated": lambda p: Easgd(period=3, servers=p, placement="colocated"),
}
METHODS = {"EASGD": optim.sgd(RATE), "EAMSGD": optim.sgd(RATE, MOMENTUM, nesterov=True)}


def trained(world, way, method, until=(5, 12)):
    """Return this worker's own parameters and the arena's, and what happened."""
    replica = Quadratic()
    engine = WAYS[way](world.size).build(world, replica, METHODS[method])
    work, start = Targets(engine.worker), 0
    for stop in until:
        assert engine.train(work, start, stop) == (stop, Flags())
        start = stop
    reported = world.gather(json.dumps(engine.recorder.take_intervals()))
    happened = next(item for item in map(json.loads, reported) if item)
    own = engine._worker.worker_state.pieces()[0].array if engine.worker is not None else None
    engine.close()
    return engine, own, replica.arena.param, happened


def simulated(size: int, happened, moving_rate: float, period: int, nesterov: bool):
    """Return what the workers and the centre end with, and the steps that each has done."""
    centre = np.arange(float(LENGTH))
    x, v, clock = [centre.copy() for _ in range(size)], [0.0] * size, [0] * size
    leave = [(0, 0)] * size

    def step(i):
        g = x[i] - target(i, clock[i])
        v[i] = MOMENTUM * v[i] + g
        x[i] = x[i] - RATE * (g + MOMENTUM * v[i] if nesterov else g)
        clock[i] += 1

    for interval in happened:
        for event in map(Event.from_json, interval["events"]):
            for i in event.reporters:
                assert clock[i] == leave[i][0] or not leave[i][1]
                for _ in range(leave[i][1] - 1):
                    step(i)
                d = 0.0
                if event.order.action == GradientAction.ELASTIC:
                    assert (clock[i] + 1) % period == 0
                    d = moving_rate * (x[i] - centre)
                    centre = centre + d
                if leave[i][1]:
                    step(i)
                x[i] = x[i] - d
                leave[i] = (0, 0)
            for worker, go, at, _ in event.replies:
                leave[worker] = (at, go)
    return x, centre, clock


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", WAYS)
@on_ranks(3, 5, mpi=(3, 4))
def test_the_equations_of_the_paper(ranks, way, method):
    """The difference is taken from what was sent, and lands after the step taken meanwhile."""
    for engine, own, arena, happened in ranks(trained, way, method):
        options = WAYS[way](ranks.size)
        rate = options.moving_rate or 0.9 / engine.workers
        x, centre, clock = simulated(
            engine.workers, happened, rate, options.period, method == "EAMSGD"
        )
        assert sum(clock) == 12 * engine.workers  # no step too many, whoever took it
        if own is not None:
            np.testing.assert_allclose(own, x[engine.worker], rtol=1e-12, atol=1e-10)
            np.testing.assert_allclose(arena, centre, rtol=1e-12, atol=1e-10)
            assert abs(own - arena).max() > 1e-3


@pytest.mark.parametrize("period", [1, 3])
def test_one_worker_and_its_centre(period):
    """There is but one order: the recurrence can be written down without a log."""

    def body(world):
        replica = Quadratic()
        engine = Easgd(period=period, moving_rate=0.5, placement="colocated").build(
            world, replica, METHODS["EASGD"]
        )
        engine.train(Targets(0), 0, 10)
        engine.close()
        return replica.arena.param

    x = centre = np.arange(float(LENGTH))
    for t in range(10):
        g, d = x - target(0, t), 0.5 * (x - centre) * ((t + 1) % period == 0)
        x, centre = x - RATE * g - d, centre + d
    (result,) = run_on("threads", 1, body)
    np.testing.assert_allclose(result, centre, rtol=1e-12, atol=1e-10)


def test_one_exchange_sends_the_parameters_up_and_the_difference_down():
    def body(world):
        replica = Quadratic()
        engine = Easgd(period=4).build(world, replica, METHODS["EASGD"])
        sent = []
        for until in (40, 40, 80):  # the second ends at once: there is nothing left to do
            before = engine.bytes_sent
            engine.train(Targets(engine.worker), len(sent) and 40, until)
            sent.append(engine.bytes_sent - before)
        engine.close()
        return engine.worker is not None, sent, replica.arena.param.nbytes

    *workers, (_, (server, rest, _), n) = run_on("threads", 3, body)
    exchanges = 2 * 40 / 4
    small = 4000  # reports and answers
    up = sum(sent[0] for _, sent, _ in workers)
    assert 0 <= up - (exchanges - 1) * n <= n + small  # the last may be left over
    assert abs(server - up - 2 * n) <= small  # and to each worker the centre, at the end
    assert abs(rest - 2 * n) <= small


def test_a_request_to_stop_and_a_bad_loss_end_all():
    def body(world, flags):
        replica = Quadratic()
        engine = Easgd(period=4).build(world, replica, METHODS["EASGD"])
        work = Targets(engine.worker, flags, count=6 if engine.worker == 1 else 0)
        result = engine.train(work, 0, 5000)
        engine.close()
        return result, np.isfinite(replica.arena.param).all(), replica.arena.param.tobytes()

    for flags in (Flags(stop=1), Flags(failed=2)):
        result = run_on("threads", 4, lambda w, f=flags: body(w, f))
        assert len({item for item, _, _ in result}) == 1
        (step, observed), _, _ = result[0]
        assert observed == flags and 0 < step < 5000
        assert all(finite for _, finite, _ in result)
        assert len({param for _, _, param in result[:3]}) == 1  # all workers hold the centre


SLOW = {
    "easgd": Easgd(period=2, placement="colocated"),
    "gossip": Gossip(),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", SLOW)
def test_who_serves_waits_for_the_last_step_of_another(monkeypatch, way):
    """However long it takes: the limit is for threads that have nothing more to do."""
    monkeypatch.setattr(server_side, "JOIN_TIMEOUT_S", 0.1)

    def body(world):
        engine = SLOW[way].build(world, Quadratic(), METHODS["EASGD"])
        work = Targets(engine.worker)
        if world.rank == 0:
            task = work.task
            work.task = lambda step: time.sleep(0.5) or task(step)
        result = engine.train(work, 0, 3)
        engine.close()
        return result

    assert run_on("threads", 2, body) == [(3, Flags())] * 2


# What follows goes through a Trainer.

REPLAYED = {
    "dedicated": Easgd(period=2),
    "2 servers": Easgd(period=3, servers=2),
    "colocated": Easgd(period=1, servers=2, placement="colocated"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", REPLAYED)
@on_ranks(4, mpi=(4,))
def test_a_replay_ends_with_the_same_bytes(ranks, tmp_path, way):
    ranks(lambda world: must_replay_the_same_bytes(world, tmp_path, REPLAYED[way]))


@pytest.mark.parametrize("model", MODELS)
def test_a_run_goes_on_where_it_was(tmp_path, model):
    """Interrupted or not, the same order of exchanges leads to the same bytes."""
    half = {"steps": 10, "checkpoints": CheckpointOptions(every_steps=10)}
    run, options = tmp_path / "run", Easgd(period=3)
    run_on("threads", 4, lambda w: fit(w, run, options, model, **half))
    two = run_on("threads", 4, lambda w: fit(w, run, options, model, steps=20, resume=True))
    item = run_on("threads", 4, lambda w: fit(w, tmp_path / "1", options, model, steps=20,
                                             replay=run))  # fmt: skip
    for (_, result), (_, expected) in zip(two[:3], item[:3], strict=True):
        assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", [3, 5])
def test_other_workers_begin_at_the_centre(tmp_path, size):
    run, options = tmp_path / "run", Easgd(period=3)
    (_, centre), *_ = run_on("threads", 4, lambda w: fit(w, run, options))
    run_on("threads", size, lambda w: must_continue_from(w, run, options, centre))


REFUSED = {
    "never": ({"period": 0}, "period: input should be greater than or equal to 1"),
    "too far": ({"moving_rate": 1.0}, "moving_rate: input should be less than 1"),
    "nowhere": ({"moving_rate": 0.0}, "moving_rate: input should be greater than 0"),
    "another's": ({"staleness": 1}, "staleness: belongs to ps-async"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_refused(wrong):
    options, message = REFUSED[wrong]
    with pytest.raises(UsageError) as error:
        recipe.load(
            "digits", ["engine.kind=easgd", *(f"engine.{k}={v}" for k, v in options.items())]
        )
    assert message in str(error.value)


def test_servers_leave_room_for_workers():
    with pytest.raises(UsageError, match="needs at least 3 ranks, seen 2; start more"):
        run_on("threads", 2, lambda w: Easgd(servers=2).build(w, Quadratic(), METHODS["EASGD"]))


def test_the_trainer_says_where_a_loss_was_not_finite(monkeypatch):
    plant_nan(monkeypatch)
    message = r"not finite at step \d+ on rank 0"
    run_on("threads", 4, lambda w: must_report_a_nan(w, Easgd(period=2), message))
