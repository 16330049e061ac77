"""Local SGD and its variants against the equations of their papers, in NumPy and float64."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from ranks import on_ranks, run_on

from hpctrain import data, engines, nn, optim
from hpctrain.core.errors import StoppedError, TrainingError, UsageError
from hpctrain.core.signals import StopRequest
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.training import recipe, runs
from hpctrain.training.run_options import FitOptions
from hpctrain.training.trainer import Trainer
from hpctrain.transport.paths import RankPlace
from hpctrain.world import World

SAMPLES, BATCH, STEPS = 151, 37, 26  # the last batch of an epoch has 3 samples: fewer than 5 ranks
EPOCH = -(-SAMPLES // BATCH)
RATE, MOMENTUM = 0.1, 0.9
HOSTS = ("a", "a", "b", "c", "b")
MODEL = nn.MlpOptions(widths=[64, 12, 10])


@cache
def digits() -> data.Dataset:
    train = data.DigitsOptions().load(0).train
    return data.Dataset(train.x[:SAMPLES], train.y[:SAMPLES])


def trained(world, engine, optimizer, steps: int = STEPS, **options) -> np.ndarray:
    """Return the parameters after training: those that are evaluated and saved."""
    world = World(
        world.link, tuple(map(RankPlace, HOSTS[: world.size])), concurrent=world.concurrent
    )
    built = MODEL.build((8, 8), 10)
    trainer = Trainer(built, optimizer, engine, precision="float64", world=world)
    trainer.fit(digits(), steps=steps, batch=BATCH, **options)
    trainer.close()
    return trainer.replica.arena.param


@on_ranks(1, 2, 3, 4, 5)
def test_averaging_in_each_step_is_averaging_gradients(ranks):
    """For plain SGD, where shares are uneven or empty too."""
    start, (end,) = (
        run_on("threads", 1, lambda w, n=n: trained(w, engines.Single(), optim.sgd(RATE), n))
        for n in (1, STEPS)
    )
    for result in ranks(trained, engines.LocalSgd(period=1), optim.sgd(RATE)):
        assert np.linalg.norm(result - end) <= 1e-10 * np.linalg.norm(end - start[0])


def simulated(size: int, options: engines.LocalSgd) -> tuple[np.ndarray, int]:
    """Return what the papers' equations make of `size` workers, and how often they averaged.

    Momentum as in hpctrain/optim/sgd.py. Gradients are those of the model; everything else is
    written down here once more.
    """
    replica = ModelReplica(MODEL.build((8, 8), 10), 0, np.float64)
    sampler = data.Sampler(SAMPLES, BATCH, 0)
    x = [replica.arena.param.copy() for _ in range(size)]
    v = [np.zeros_like(x[0]) for _ in range(size)]
    centre, velocity, under_way, averagings = x[0].copy(), np.zeros_like(x[0]), None, 0

    def gradient(i: int, step: int) -> np.ndarray:
        """Return the gradient at x[i] of worker i's share of the batch."""
        indexes = sampler.batch_indexes(step)
        first, own = data.share(indexes, i, size)
        replica.arena.param[...] = x[i]
        batch, key = Batch.of(*digits().rows(own)), nn.Key(0, step, first)
        replica.gradient(batch, 1 / len(indexes), key, lambda name: None)
        return replica.arena.grad.copy()

    for step in range(STEPS):
        g = [gradient(i, step) for i in range(size)]
        alone = step >= options.start_after
        for i in range(size):
            nodes = options.apart == "nodes"
            local = [k for k in range(size) if (HOSTS[k] == HOSTS[i] if nodes else k == i)]
            own = sum(size / len(local) * g[k] for k in local)
            v[i] = MOMENTUM * v[i] + (own if alone else sum(g))
            x[i] = x[i] - RATE * v[i]
        since = (step + 1 - options.start_after) % options.period
        if not alone:
            centre = x[0].copy()
        elif options.delay and under_way is not None and since == options.delay:
            s, total, under_way = options.delay, under_way, None
            x = [(2 * s * item + total) / (2 * s + size) for item in x]
        elif since == 0:
            averagings += 1
            mean = sum(x) / size
            if options.delay:
                under_way = sum(x)
                continue
            if options.outer == "nesterov":
                delta = centre - mean
                velocity = options.outer_momentum * velocity + delta
                centre = centre - options.outer_rate * (delta + options.outer_momentum * velocity)
                mean = centre
            x = [mean.copy() for _ in x]
            if options.momentum == "averaged":
                v = [sum(v) / size] * size
    return sum(x) / size, averagings


WAYS = {
    "local SGD": engines.LocalSgd(period=4),
    "momentum averaged": engines.LocalSgd(period=4, momentum="averaged", algorithm="tree"),
    "post-local": engines.LocalSgd(period=4, start_after=7),
    "DiLoCo": engines.LocalSgd(period=5, outer="nesterov", outer_rate=0.7, outer_momentum=0.9),
    "post-local DiLoCo": engines.LocalSgd(
        period=6, start_after=3, outer="nesterov", outer_rate=0.5, outer_momentum=0.0
    ),
    "in nodes": engines.LocalSgd(period=4, apart="nodes"),
    "late": engines.LocalSgd(period=4, delay=2),
    "DASO": engines.LocalSgd(period=4, delay=2, apart="nodes"),
    "late, at once": engines.LocalSgd(period=2, delay=1, start_after=1),
}


@cache
def told(size: int, way: str) -> np.ndarray:
    return simulated(size, WAYS[way])[0]


@pytest.mark.parametrize("way", WAYS)
@on_ranks(1, 2, 3, 5, mpi=(2, 3))
def test_the_equations_of_the_papers(ranks, way):
    """Rounds that evaluations and rows cut in two change nothing."""
    options = {"evaluate": digits(), "options": FitOptions(evaluate_steps=3, interval_steps=5)}
    expected = told(ranks.size, way)
    for result in ranks(lambda w: trained(w, WAYS[way], optim.sgd(RATE, MOMENTUM), **options)):
        assert abs(result - expected).max() < 1e-12


def test_the_equations_differ():
    """Or the test above would compare one method with itself."""
    ends = [told(3, way) for way in WAYS]
    assert min(abs(a - b).max() for i, a in enumerate(ends) for b in ends[:i]) > 1e-6


@on_ranks(3, mpi=(2,))
def test_where_only_one_thread_may_communicate(ranks):
    """A delayed average then travels at once, and is mixed in as late as ever."""

    def body(world):
        world = replace(world, concurrent=False)
        assert abs(trained(world, WAYS["DASO"], optim.sgd(RATE, MOMENTUM)) - expected).max() < 1e-12

    expected = told(ranks.size, "DASO")
    ranks(body)


@pytest.mark.parametrize(
    "way", [engines.LocalSgd(period=4, delay=2, start_after=2), WAYS["post-local"]]
)
@on_ranks(3, mpi=())
def test_a_second_training_begins_with_the_same_parameters_everywhere(ranks, monkeypatch, way):
    """The first ended within a round; the second begins with steps of averaged gradients."""
    gradient = ModelReplica.gradient

    def body(world):
        trainer = Trainer(
            MODEL.build((8, 8), 10),
            optim.sgd(RATE, MOMENTUM),
            way,
            precision="float64",
            world=world,
        )
        trainer.replica.seen = observed = []
        for _ in range(2):
            trainer.fit(digits(), steps=12, batch=BATCH)
            observed.append(trainer.replica.arena.param.copy())
        # 12 gradients, the mean in the end, and the first two gradients of the second training.
        assert np.array_equal(observed[12], observed[13])
        spread = trainer.engine.sum(observed[14]) / world.size - observed[14]
        trainer.close()
        assert abs(spread).max() < 1e-15

    def noting(self, *args):
        self.seen.append(self.arena.param.copy())
        return gradient(self, *args)

    monkeypatch.setattr(ModelReplica, "gradient", noting)
    ranks(body)


def test_the_numbers_of_diloco_are_those_of_its_paper():
    arguments = engines.LocalSgd(period=5, outer="nesterov", outer_rate=0.7, outer_momentum=0.9)
    ends = [
        run_on("threads", 2, lambda w, e=e: trained(w, e, optim.adamw(0.01)))[0]
        for e in (arguments, engines.LocalSgd(period=5, outer="nesterov"))
    ]
    assert np.array_equal(*ends)


@pytest.mark.either
def test_the_loss_does_not_rise_with_the_defaults_of_diloco():
    """With the period of local SGD it does: the outer momentum adds up changes of 10 rounds."""
    assert engines.LocalSgd(outer="nesterov") == engines.LocalSgd(outer="nesterov", period=64)
    assert engines.LocalSgd().period == 8

    def largest_rise(**options):
        losses = run_on("threads", 2, lambda w: digits_losses(w, **options))[0]
        return max(after - before for before, after in pairwise(losses))

    assert largest_rise() < 0.01
    assert largest_rise(period=8) > 0.05


def digits_losses(world, **options):
    """Return the training loss every 8 steps of the recipe `digits`, with an outer optimizer."""
    engine, rows = engines.LocalSgd(outer="nesterov", **options), []
    model = nn.MlpOptions(widths=[64, 256, 256, 10]).build((8, 8), 10)
    optimizer = optim.sgd(0.05, 0.9)
    with Trainer(model, optimizer, engine, world=world, callbacks=[rows.append]) as trainer:
        fit_options = FitOptions(evaluate_steps=8, interval_steps=8)
        train = data.DigitsOptions().load(0).train
        trainer.fit(train, steps=160, batch=128, evaluate=train, options=fit_options)
    return [row["test_loss"] for row in rows if row.get("test_loss") is not None]


@on_ranks(2, 3)
def test_bytes_fall_with_the_period(ranks):
    """2n(P-1) over all ranks for each averaging, and a few for flags and sums."""

    def body(world):
        built = nn.MlpOptions(widths=[64, 64, 10]).build((8, 8), 10)
        sent = {}
        for period in (1, 2, 12):
            engine = engines.LocalSgd(period=period, algorithm="ring")
            trainer = Trainer(built, optim.sgd(RATE), engine, precision="float64", world=world)
            before = trainer.engine.bytes_sent
            trainer.fit(digits(), steps=24, batch=BATCH, options=FitOptions(interval_steps=24))
            sent[period] = trainer.engine.sum(np.array([trainer.engine.bytes_sent - before]))[0]
            trainer.close()
        n, size = trainer.replica.arena.param.nbytes, world.size
        for period, total in sent.items():
            averagings = 24 // period
            short = averagings * size * 4 * 16 + 14_000
            assert 0 <= total - averagings * 2 * n * (size - 1) <= short < n

    ranks(body)


RESUMED = {
    "kept": ["engine.period=5"],
    "averaged": ["engine.period=5", "engine.momentum=averaged"],
    "DiLoCo": ["engine.period=7", "engine.outer=nesterov", "optimizer.kind=adamw",
               "optimizer.momentum=", "optimizer.rate=0.001"],
    "delayed": ["engine.period=5", "engine.delay=3", "engine.start_after=4"],
    "resnet": ["engine.period=5", "model.kind=resnet20", "model.widths=", "model.blocks=1",
               "model.channels=[4, 6]"],
}  # fmt: skip
LONG, SAVED = 20, (3, 6, 11, 16)


def run(world, out, way: str, steps: int, resume: bool = False):
    """Train `steps` of `LONG` steps: the schedule is constant, so that the first are the same."""
    sets = ["engine.kind=local-sgd", "run.epochs=", f"run.steps={steps}", "schedule.kind=constant",
            "schedule.warm_up_epochs=", "run.precision=float64", *RESUMED[way]]  # fmt: skip
    return runs.train(recipe.load("digits", sets), world, out, resume)["params_sha256"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", RESUMED)
def test_resumed_in_the_middle_of_a_round(tmp_path, way):
    """As many workers end with the same bytes, running statistics too; others are near."""
    complete, cut = tmp_path / "whole", tmp_path / "cut"
    expected = run_on("threads", 3, lambda w: run(w, complete, way, LONG))
    for steps in (*SAVED, LONG):
        ends = run_on("threads", 3, lambda w, n=steps: run(w, cut, way, n, n > SAVED[0]))
    assert set(ends) == set(expected) and len(set(ends)) == 1
    arenas = [runs.load(folder).replica.arena for folder in (complete, cut)]
    assert np.array_equal(*(arena.buffer for arena in arenas))
    for size in (2, 4):
        other = tmp_path / str(size)
        run_on("threads", 3, lambda w, out=other: run(w, out, way, SAVED[-1]))
        run_on("threads", size, lambda w, out=other: run(w, out, way, LONG, True))
        end = runs.load(other).replica.arena.param
        # Workers that trained on other shares: near, but not equal.
        assert 0 < np.linalg.norm(end - arenas[0].param) < 0.2 * np.linalg.norm(end)


@pytest.mark.parametrize("engine", [engines.LocalSgd(period=6), WAYS["DASO"], WAYS["DiLoCo"]])
@on_ranks(1, 3)
def test_a_loss_that_is_not_finite_reaches_nobody(ranks, engine, monkeypatch):
    """Rank 1 (or the only one) is given nonsense in step 7; all fail, with finite parameters."""
    gradient, rank = ModelReplica.gradient, min(1, ranks.size - 1)

    def body(world):
        def spoilt(self, batch, scale, key, on_ready):
            if key.step == 7 and self.spoilt:
                batch = batch._replace(inputs=np.full_like(batch.inputs, np.nan))
            return gradient(self, batch, scale, key, on_ready)

        monkeypatch.setattr(ModelReplica, "gradient", spoilt)
        trainer = Trainer(
            MODEL.build((8, 8), 10), optim.sgd(RATE), engine, precision="float64", world=world
        )
        trainer.replica.spoilt = world.rank == rank
        with pytest.raises(TrainingError, match=f"not finite at step 7 on rank {rank} "):
            trainer.fit(digits(), steps=STEPS, batch=BATCH)
        param = trainer.replica.arena.param
        assert np.isfinite(param).all()
        assert trainer.engine.sum(param[:500]) == pytest.approx(world.size * param[:500], abs=1e-12)
        trainer.close()

    ranks(body)


REFUSED = {
    "no steps": ({"period": 0}, "greater than or equal to 1"),
    "outer keys alone": ({"outer_rate": 0.5}, "outer_rate: expected outer = 'nesterov' beside it"),
    "late": ({"period": 4, "delay": 4}, "delay: expected less than the period of 4 steps"),
    "delay and outer": ({"delay": 1, "outer": "nesterov"}, "delay: expected outer = 'none'"),
    "delay and momentum": ({"delay": 1, "momentum": "averaged"}, "and momentum = 'kept'"),
    "another's": ({"shard_optimizer": True}, "shard_optimizer: belongs to allreduce"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_refused(wrong):
    options, message = REFUSED[wrong]
    sets = [f"engine.{key}={str(value).lower()}" for key, value in options.items()]
    with pytest.raises(UsageError) as error:
        recipe.load("digits", ["engine.kind=local-sgd", *sets])
    assert message in str(error.value) and "ArgsKwargs" not in str(error.value)


def test_a_request_to_stop_is_heard_at_the_next_averaging(tmp_path, monkeypatch):
    complete, cut = tmp_path / "whole", tmp_path / "cut"
    expected = run_on("threads", 3, lambda w: run(w, complete, "kept", LONG))
    monkeypatch.setattr(StopRequest, "requested", property(lambda _: True, _ignore), False)
    with pytest.raises(StoppedError, match=f"stopped at step 5 of {LONG}"):
        run_on("threads", 3, lambda w: run(w, cut, "kept", LONG))
    monkeypatch.undo()
    assert run_on("threads", 3, lambda w: run(w, cut, "kept", LONG, True)) == expected


def _ignore(request, value) -> None:
    """Take no note: `requested` is what the test says."""


INNER = ["engine.outer=nesterov", "optimizer.kind=adamw", "optimizer.momentum=",
         "optimizer.rate=0.001"]  # fmt: skip


# That the others learn, test_accuracy.py shows in fewer epochs.
FULL = [[f"engine.{key}"] for key in ("period=8", "delay=3")]


@pytest.mark.parametrize(
    "way", [INNER, *(pytest.param(way, marks=pytest.mark.full) for way in FULL)]
)
@pytest.mark.full
def test_digits_reaches_its_accuracy(tmp_path, monkeypatch, way):
    """The mean of 3 seeds on 4 ranks is at least 0.95."""
    monkeypatch.chdir(tmp_path)
    result = []
    for seed in range(3):
        spec = recipe.load("digits", ["engine.kind=local-sgd", *way, f"run.seed={seed}"])
        result.append(run_on("threads", 4, lambda w, s=spec: runs.train(s, w, None, False))[0])
    assert np.mean([item["test_accuracy"] for item in result]) >= 0.95
