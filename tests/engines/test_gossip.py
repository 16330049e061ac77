"""Gossip against the equations of its papers, in NumPy; pairs in the order of the logs."""

from __future__ import annotations

import json
from dataclasses import replace

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
from hpctrain.engines import Flags, Gossip
from hpctrain.engines.gossip.d_psgd import GRAPHS
from hpctrain.engines.gossip.pairs import choose_partner
from hpctrain.engines.gossip.turns import END_TURN, OWN_TURN
from hpctrain.training import recipe
from hpctrain.training.run_options import CheckpointOptions

RATE, MOMENTUM = 0.02, 0.9
EVERY = ("bipartite", "ring", "exponential")


def weights(graph: str, step: int, ranks: int) -> np.ndarray:
    """Return W, of which row i says what worker i takes of the others."""
    w = np.zeros((ranks, ranks))
    for i in range(ranks):
        of = GRAPHS[graph].neighbours(step, i, ranks).sources
        w[i, [i, *of]] = 1 / (1 + len(of))
    return w


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("ranks", range(2, 18))
def test_the_graphs_keep_the_sum_and_are_crossed_in_time(graph, ranks):
    """W is doubly stochastic; whom one receives from sends; all hear of each other in time."""
    for first in range(4):
        heard = np.eye(ranks)
        for step in range(first, first + GRAPHS[graph].diameter(ranks)):
            w = weights(graph, step, ranks)
            assert w.sum(0) == pytest.approx(1) and w.sum(1) == pytest.approx(1)
            heard = w @ heard
            for i in range(ranks):
                to, _ = GRAPHS[graph].neighbours(step, i, ranks)
                assert all(i in GRAPHS[graph].neighbours(step, j, ranks).sources for j in to)
        assert (heard > 0).all()


def trained(world, graph, optimizer, dtype=np.float64, begin=None):
    """Return rank, own parameters, the arena, and what happened on every rank."""
    replica = Quadratic(dtype)
    engine = Gossip(graph=graph).build(world, replica, optimizer)
    if begin is not None:
        replica.arena.param[:] = begin[world.rank]
    work = Targets(engine.worker)
    for start, stop in ((0, 5), (5, 12)):
        assert engine.train(work, start, stop) == (stop, Flags())
    engine.settle()
    happened = engine.recorder.take_intervals() if engine.recorder else []
    reported = [json.loads(item) for item in world.gather(json.dumps(happened))]
    own = {piece.name: piece.array.copy() for piece in engine.state()}
    engine.close()
    return world.rank, own[f"worker.{world.rank}.param"], replica.arena, reported


def begins(size: int) -> np.ndarray:
    return np.tile(np.arange(float(LENGTH)), (size, 1))


@pytest.mark.parametrize("graph", GRAPHS)
@on_ranks(2, 3, 4, 5, mpi=(2, 4))
def test_all_in_step(ranks, graph):
    """X <- W X - update(G), G being taken before averaging; Nesterov's momentum as in sgd.py."""
    size, x = ranks.size, begins(ranks.size)
    v = np.zeros_like(x)
    for step in range(12):
        g = size * (x - [target(i, step) for i in range(size)])
        v = MOMENTUM * v + g
        x = weights(graph, step, size) @ x - RATE * (g + MOMENTUM * v)
    assert abs(x - x[0]).max() > 1e-3
    for rank, own, arena, _ in ranks(trained, graph, optim.sgd(RATE, MOMENTUM, True)):
        np.testing.assert_allclose(own, x[rank], rtol=1e-12, atol=1e-10)
        np.testing.assert_allclose(arena.param, x.mean(0), rtol=1e-12, atol=1e-10)
        assert arena.buffer == pytest.approx(11)


def simulated(size: int, reported) -> np.ndarray:
    """Return what all end with, given each passive worker's turns; only the order comes from there.

    An event happens when it is the next one on both sides: were there a circle, none would be.
    """
    x = begins(size)
    at, clock = x.copy(), [0] * size  # where gradients are made, and the steps done

    def update(i):
        x[i] -= RATE * (at[i] - target(i, clock[i]))
        at[i], clock[i] = x[i], clock[i] + 1

    def is_next(p, coming):
        return coming == OWN_TURN or choose_partner(0, coming, clock[coming], size) == p

    for interval in range(2):
        at[:] = x  # all have met
        turns = {
            p: [w for w in reported[p][interval]["turns"] if w >= OWN_TURN]
            for p in range(1, size, 2)
        }
        while any(turns.values()):
            before = sum(map(len, turns.values()))
            for p, coming in turns.items():
                while coming and is_next(p, coming[0]):
                    subject = coming.pop(0)
                    if subject != OWN_TURN:
                        x[p] = x[subject] = (x[p] + x[subject]) / 2
                    update(p if subject == OWN_TURN else subject)
            assert sum(map(len, turns.values())) < before
    assert sum(clock) == 12 * size
    return x


@on_ranks(2, 3, 4, 5, mpi=(2, 4))
def test_pairs_at_their_own_pace(ranks):
    """Both get the mean; a gradient is made before an averaging and taken after it."""
    for rank, own, arena, reported in ranks(trained, "bipartite", optim.sgd(RATE)):
        x = simulated(ranks.size, reported)
        np.testing.assert_allclose(own, x[rank], rtol=1e-12, atol=1e-10)
        np.testing.assert_allclose(arena.param, x.mean(0), rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("graph", EVERY)
@on_ranks(2, 4, 5, mpi=(4,))
def test_averaging_keeps_the_sum(ranks, graph, dtype):
    """With a rate of 0: to the rounding of each averaging, while workers come closer."""
    begin = np.random.default_rng(0).normal(size=(ranks.size, LENGTH)).astype(dtype)

    def body(world):
        _, own, _, _ = trained(world, graph, optim.sgd(0.0), dtype, begin)
        return world.gather(own.astype(np.float64).tobytes().hex())

    for reported in ranks(body):
        end = np.array([np.frombuffer(bytes.fromhex(item)) for item in reported])
        drift = abs(end.sum(0) - begin.astype(np.float64).sum(0)).max()
        assert drift <= 12 * ranks.size * np.finfo(dtype).eps * abs(begin).max()
        assert end.var(0).mean() < begin.var(0).mean() / 2


@pytest.mark.parametrize(("graph", "copies"), [("ring", 2), ("exponential", 1)])
def test_bytes_of_a_step(graph, copies):
    def body(world):
        engine = Gossip(graph=graph).build(world, Quadratic(), optim.sgd(RATE))
        before = engine.bytes_sent
        engine.train(Targets(engine.worker), 0, 10)
        engine.close()
        return engine.bytes_sent - before, engine.replica.arena.param.nbytes

    for sent, n in run_on("threads", 4, body):
        assert 10 * copies * n <= sent <= 10 * copies * (n + 8) + 100


def test_bytes_of_pairs():
    """An active worker sends as much as those that answer it: n in each of its steps."""

    def body(world):
        engine = Gossip().build(world, Quadratic(), optim.sgd(RATE))
        before = engine.bytes_sent
        engine.train(Targets(engine.worker), 0, 20)
        turns = [
            subject
            for item in engine.recorder.take_intervals()
            for subject in item.get("turns", [])
        ]
        engine.close()
        met = [subject for subject in turns if subject > OWN_TURN]
        return engine.bytes_sent - before, len(met), engine.replica.arena.param.nbytes

    result = run_on("threads", 4, body)
    n, meetings = result[0][2], sum(met for _, met, _ in result)
    for sent in (sum(item[0] for item in result[::2]), sum(item[0] for item in result[1::2])):
        assert meetings * n <= sent <= meetings * n + 20_000
    assert 0 < meetings < 4 * 20


@pytest.mark.parametrize("flags", [Flags(stop=1), Flags(failed=2)], ids=["stop", "nan"])
@pytest.mark.parametrize("graph", EVERY)
@on_ranks(5, mpi=(4,))
def test_a_request_to_stop_and_a_bad_loss_end_all(ranks, graph, flags):
    """Without a nan in any worker's parameters; where all are in step, in the time of the graph."""

    def body(world):
        engine = Gossip(graph=graph).build(world, Quadratic(), optim.sgd(RATE))
        work = Targets(engine.worker, flags, count=6 if engine.worker == 1 else 0)
        result = engine.train(work, 0, 5000)
        engine.settle()
        state = {piece.name: piece.array for piece in engine.state()}
        engine.close()
        assert all(np.isfinite(x).all() for x in state.values())
        return result, engine.replica.arena.param.tobytes()

    if not (result := ranks(body)):
        return  # a rank that looks on
    assert len(set(result)) == 1
    (step, observed), _ = result[0]
    assert observed == flags and 0 < step < 5000
    if graph != "bipartite":
        # From the sixth task on: the stop is said before the seventh; the loss is of the sixth.
        assert step == (6 + GRAPHS[graph].diameter(ranks.size) if flags.stop else 5)


# What follows goes through a Trainer.


@pytest.mark.sample(1)
@on_ranks(4, 5, mpi=(4,))
def test_a_replay_ends_with_the_same_bytes(ranks, tmp_path):
    ranks(lambda world: must_replay_the_same_bytes(world, tmp_path, Gossip(graph="bipartite")))


def test_a_replay_lets_a_worker_leave_before_others_have_met():
    """Worker 0 has no step at all; only when it has said so may the others begin with theirs."""
    none = [[], 0, 0.0, [], False]
    heard = [(0, 0), (0, None), (1, 1), (2, 1), (1, 0), (2, 0), (1, None), (2, None)]
    events = [[[w], none, [] if go is None else [[w, go, 0, 0]]] for w, go in heard]
    events.append([[], [[], 0, 1.0, [], True], [[w, 0, 1, 1] for w in range(3)]])
    counted = {"histogram": {}, "clock_gap_max": 0, "dropped": 0}
    logs = {
        0: {"events": events, "clocks": [0, 1, 1], "staleness": counted},
        1: {"turns": [END_TURN - 0, OWN_TURN, 2, END_TURN - 2]},
    }

    def body(world):
        engine = Gossip().build(world, Quadratic(), optim.sgd(RATE))
        log = [{"start": 0, "until": 1, **logs[world.rank]}] if world.rank in logs else []
        engine.recorder.start_replay(log, 0)
        result = engine.train(Targets(engine.worker), 0, 1)
        engine.close()
        return result

    assert run_on("threads", 3, body) == [(1, Flags())] * 3


def test_all_in_step_there_is_but_one_order(tmp_path):
    with pytest.raises(UsageError, match="is deterministic by itself"):
        run_on("threads", 2, lambda w: fit(w, None, Gossip(graph="ring"), replay=tmp_path))


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("graph", EVERY)
def test_a_run_goes_on_where_it_was(tmp_path, graph, model):
    """Interrupted or not, the same order of meetings leads to the same bytes."""
    run, options = tmp_path / "run", Gossip(graph=graph)
    half = {"steps": 10, "checkpoints": CheckpointOptions(every_steps=10)}
    run_on("threads", 3, lambda w: fit(w, run, options, model, **half))
    two = run_on("threads", 3, lambda w: fit(w, run, options, model, steps=20, resume=True))
    again = {"steps": 20, "replay": run if graph == "bipartite" else None}
    item = run_on("threads", 3, lambda w: fit(w, tmp_path / "1", options, model, **again))
    for (_, result), (_, expected) in zip(two, item, strict=True):
        assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("graph", EVERY)
@pytest.mark.parametrize("size", [2, 5])
def test_other_workers_begin_at_the_mean(tmp_path, size, graph):
    run, options = tmp_path / "run", Gossip(graph=graph)
    (_, mean), *_ = run_on("threads", 4, lambda w: fit(w, run, options))
    run_on("threads", size, lambda w: must_continue_from(w, run, options, mean))


@pytest.mark.parametrize("graph", EVERY)
def test_the_trainer_says_where_a_loss_was_not_finite(monkeypatch, graph):
    plant_nan(monkeypatch)
    message = "not finite at step 3 on rank 0"
    run_on("threads", 4, lambda w: must_report_a_nan(w, Gossip(graph=graph), message))


def test_one_worker_alone_is_refused():
    with pytest.raises(UsageError, match="needs at least 2 workers"):
        run_on("threads", 1, lambda w: Gossip().build(w, Quadratic(), optim.sgd(RATE)))


def test_one_thread_is_enough_where_all_are_in_step():
    def body(world, graph):
        world = replace(world, concurrent=False)
        return trained(world, graph, optim.sgd(RATE))[1]

    with pytest.raises(UsageError, match="needs an MPI with THREAD_MULTIPLE"):
        run_on("threads", 2, lambda w: body(w, "bipartite"))
    alone = run_on("threads", 3, lambda w: body(w, "ring"))
    beside = run_on("threads", 3, lambda w: trained(w, "ring", optim.sgd(RATE))[1])
    assert np.array_equal(alone, beside)


REFUSED = {
    "another graph": ({"graph": "tree"}, "graph: input should be 'bipartite', 'ring' or"),
    "another's": ({"period": 3}, "period: belongs to local-sgd and easgd"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_refused(wrong):
    options, message = REFUSED[wrong]
    with pytest.raises(UsageError) as error:
        recipe.load(
            "digits", ["engine.kind=gossip", *(f"engine.{k}={v}" for k, v in options.items())]
        )
    assert message in str(error.value)
