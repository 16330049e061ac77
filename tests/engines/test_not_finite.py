"""A gradient that is not finite reaches no parameters: every engine, option, value and rank.

The loss of the step is finite; one element of one tensor's gradient is planted on one rank, before
anybody is told that the tensor is ready. Where workers share each step, a run that skips it has the
bytes of the same engine's run that is never given that step.
"""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
from ranks import on_ranks, run_on, run_on_gpus

from hpctrain import data, engines, nn, optim
from hpctrain.core import xp
from hpctrain.core.errors import TrainingError, UsageError
from hpctrain.gradients import finite
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.replica import Batch, ModelReplica, ignore_ready
from hpctrain.training import recipe, runs
from hpctrain.training.run_options import FitOptions
from hpctrain.training.trainer import Trainer

STEPS, BATCH, BAD, INTERVAL = 9, 24, 4, 3
SLOT = "linear2.weight"
LARGE = float(np.finfo(np.float32).max)
VALUES = {"nan": np.nan, "inf": np.inf, "large": LARGE}
PLANTED = ["nan", pytest.param("inf", marks=pytest.mark.full), "large"]
SGD, CLIPPED = optim.sgd(0.05, 0.9), optim.sgd(0.05, 0.9, clip_norm=1.0)
MLP, RESNET = nn.MlpOptions(widths=[64, 24, 10]), nn.ResNetOptions(blocks=1, channels=[4, 6])
SMALL = {"bucket_bytes": 4096}

#: Engines whose workers share each step.
TOGETHER: dict[str, Any] = {
    "replicated, no overlap": engines.AllReduce(overlap="never"),
    "overlap": engines.AllReduce(overlap="always", **SMALL),
    "direct": engines.AllReduce(algorithm="direct"),
    "priority": engines.AllReduce(priority=True, **SMALL),
    "ordered": engines.AllReduce(reduction="ordered"),
    "ordered, overlap": engines.AllReduce(reduction="ordered", overlap="always", **SMALL),
    "shard_optimizer": engines.AllReduce(shard_optimizer=True),
    "share_parameters": engines.AllReduce(share_parameters=True),
    "bf16": engines.AllReduce(compression="bf16"),
    "fp16": engines.AllReduce(compression="fp16"),
    "top-k": engines.AllReduce(compression="top-k", compression_ratio=0.05),
    "top-k, overlap": engines.AllReduce(
        compression="top-k", compression_ratio=0.05, overlap="always", **SMALL
    ),
    "powersgd": engines.AllReduce(compression="powersgd", compression_rank=2),
    "ps-sync": engines.PsSync(),
    "ps-sync, sharded": engines.PsSync(servers=2, placement="colocated"),
    "ps-async, bound 0": engines.PsAsync(staleness=0, placement="colocated"),
    "local-sgd, at first": engines.LocalSgd(start_after=100),
}
#: Engines whose workers have steps of their own.
APART: dict[str, Any] = {
    "ps-async": engines.PsAsync(),
    "ps-async, bound 1": engines.PsAsync(staleness=1, placement="colocated"),
    "ps-async, compensated": engines.PsAsync(delay_compensation=0.04),
    "ps-async, push 2, pull 4": engines.PsAsync(push_every=2, pull_every=4),
    "ps-async, softsync": engines.PsAsync(softsync=1),
    "local-sgd": engines.LocalSgd(period=4),
    "DASO": engines.LocalSgd(period=4, delay=2),
    "local-sgd, nodes": engines.LocalSgd(period=4, apart="nodes"),
    "easgd": engines.Easgd(period=2),
    "ring": engines.Gossip(graph="ring"),
    "exponential": engines.Gossip(graph="exponential"),
    "bipartite": engines.Gossip(),
}


def digits() -> data.Dataset:
    train = data.DigitsOptions().load(0).train
    return data.Dataset(train.x[:151], train.y[:151])  # an uneven last batch


class Planted:
    """A model's replica, in the gradient of which `value` stands at some of its steps."""

    def __init__(self, replica: Any, steps: Any, value: float):
        self.inner, self.steps, self.value, self.made = replica, steps, value, 0
        self.slot, self.element = SLOT, 5
        self.evaluate, self.move, self.loss = replica.evaluate, replica.move, replica.loss
        self.normalizes_batch = replica.normalizes_batch

    @property
    def arena(self):
        return self.inner.arena

    def gradient(self, batch, scale, key, on_ready):
        planted = key.step in self.steps
        names = [slot.name for slot in self.arena.slots]

        def ready(name):
            if planted and name == (self.slot if self.slot in names else names[-2]):
                arena = self.arena
                arena.views(arena.grad)[name].reshape(-1)[self.element] = self.value
            on_ready(name)

        self.made += 1
        sums = self.inner.gradient(batch, scale, key, ready)
        assert np.isfinite(sums["loss"].sum)
        return sums


def trainer_of(world, engine, steps=(), value=np.nan, model=MLP, optimizer=SGD, **extra):
    """Return a Trainer that is given `value` in the gradients of `steps`, on this rank."""
    trainer = Trainer.__new__(Trainer)
    trainer._slowed_replica = lambda faults: Planted(trainer.replica, steps, value)
    trainer.__init__(model.build((8, 8), 10), optimizer, engine, world=world, **extra)
    return trainer


def state_of(engine) -> dict[str, bytes]:
    engine.settle()
    return {piece.name: xp.to_host(piece.array).tobytes() for piece in engine.state()}


def trained(world, engine, rank, value, *, without=None, **extra):
    """Return (state, summary) of a run that skips BAD; or of one that is never given it."""
    own = [BAD] if world.rank == rank and without is None else []
    trainer = trainer_of(world, engine, own, value, **extra)
    if without is not None:
        train = trainer.engine.train

        def around(work, start, until):
            if start <= without < until:
                _, flags = train(work, start, without) if start < without else (start, None)
                assert flags is None or not any(flags)
                return train(work, without + 1, until) if without + 1 < until else (until, flags)
            return train(work, start, until)

        trainer.engine.train = around
    summary = trainer.fit(
        digits(),
        steps=STEPS,
        batch=BATCH,
        options=FitOptions(interval_steps=2, prefetch=0, not_finite="skip"),
    )
    state = state_of(trainer.engine)
    trainer.close()
    return state, summary


def last_worker(engine, size: int) -> int:
    return engine.workers(size) - 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", PLANTED)
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("name", TOGETHER)
@on_ranks(3, mpi=())
def test_a_step_that_is_skipped_leaves_no_trace(ranks, name, first, value):
    leaves_no_trace(ranks, name, first, value)


def leaves_no_trace(ranks, name, first, value):
    engine = TOGETHER[name]
    rank = 0 if first else last_worker(engine, ranks.size)

    def body(world):
        model = RESNET if name in ("ps-sync", "replicated, no overlap") else MLP
        skipped, summary = trained(world, engine, rank, VALUES[value], model=model)
        expected, _ = trained(world, engine, rank, 0, model=model, without=BAD)
        assert skipped == expected
        assert (summary["skipped_steps"], summary["steps"]) == (1, STEPS)
        assert summary["dropped_gradients"] in (None, 0)
        assert np.isfinite(summary["train_loss"])

    ranks(body)


@pytest.mark.sample(4)
@pytest.mark.parametrize("value", PLANTED)
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("name", [*TOGETHER, *APART])
@on_ranks(3, mpi=())
def test_a_run_stops_and_says_where(ranks, name, first, value):
    stops_and_says_where(ranks, name, first, value)


def stops_and_says_where(ranks, name, first, value):
    engine = (TOGETHER | APART)[name]
    if name == "bipartite" and ranks.size < 2:
        pytest.skip("needs pairs")
    rank = 0 if first else last_worker(engine, ranks.size)

    def body(world):
        own = range(BAD, 1000) if world.rank == rank else []
        trainer = trainer_of(world, engine, own, VALUES[value])
        before = {}
        train = trainer.engine.train

        def watched(work, start, until):
            result = train(work, start, until)
            if not result[1].failed:
                before.update(state_of(trainer.engine))
            return result

        trainer.engine.train = watched
        with pytest.raises(TrainingError) as error:
            steps, interval = (STEPS, 1) if name in TOGETHER else (60, 15)
            trainer.fit(
                digits(),
                steps=steps,
                batch=BATCH,
                options=FitOptions(interval_steps=interval, prefetch=0),
            )
        assert error.value.exit_code == 3
        kind = rf"the gradient of '{SLOT}' is (not finite|too large for a sum over \d ranks)"
        location = rf"at step {BAD if name in TOGETHER else '[0-9]+'} on rank {rank} \("
        assert re.match(f"{kind} {location}", str(error.value)), str(error.value)
        arena = trainer.replica.arena
        if name in TOGETHER:
            assert state_of(trainer.engine) == before
        else:
            trainer.engine.settle()
        assert np.isfinite(arena.param).all() and abs(arena.param).max() < 100
        trainer.close()

    ranks(body)


@pytest.mark.sample(5)
@pytest.mark.parametrize("value", PLANTED)
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("name", APART)
@on_ranks(4, mpi=())
def test_a_worker_drops_its_own_gradient_and_goes_on(ranks, name, first, value):
    drops_and_goes_on(ranks, name, first, value)


def drops_and_goes_on(ranks, name, first, value):
    engine = APART[name]
    rank = 0 if first else last_worker(engine, ranks.size)
    bad = range(BAD, BAD + 2)  # with two gradients a push: one push

    def body(world):
        own = bad if world.rank == rank else []
        trainer = trainer_of(world, engine, own, VALUES[value])
        summary = trainer.fit(
            digits(),
            steps=STEPS,
            batch=BATCH,
            options=FitOptions(interval_steps=INTERVAL, not_finite="skip"),
        )
        trainer.engine.settle()
        param = trainer.replica.arena.param
        assert np.isfinite(param).all() and abs(param).max() < 100
        assert (summary["status"], summary["steps"]) == ("done", STEPS)
        assert summary["skipped_steps"] == 0 and np.isfinite(summary["train_loss"])
        dropped = trainer.engine.check.dropped
        total = trainer.engine.sum(np.array([dropped]))[0]
        assert summary["dropped_gradients"] == total
        nodes = name == "local-sgd, nodes"  # ranks of a node take, or drop, a gradient together
        # Workers at their own pace may have ended before step BAD + 1.
        assert dropped <= (2 if own or nodes else 0)
        assert total == (2 * world.size if nodes else 2) or trainer.engine.asynchronous
        trainer.close()

    ranks(body)


#: Of these a row runs over MPI in each run of the tests, of the others with `full`.
OVER_MPI = ("overlap", "shard_optimizer", "share_parameters", "ps-sync, sharded", "ps-async",
            "easgd", "exponential", "bipartite")  # fmt: skip
NAMES = [
    pytest.param(name, marks=() if name in OVER_MPI else pytest.mark.full)
    for name in TOGETHER | APART
]


@pytest.mark.parametrize("name", NAMES)
@on_ranks(mpi=(4,))
def test_over_mpi(ranks, name):
    (leaves_no_trace if name in TOGETHER else drops_and_goes_on)(ranks, name, True, "nan")
    stops_and_says_where(ranks, name, False, "large")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["overlap", "ps-sync", "local-sgd", "ring", "ps-async", "easgd"])
@on_ranks(3)
def test_no_more_than_so_many_in_a_row(ranks, name):
    engine = (TOGETHER | APART)[name]

    def body(world):
        def run(bad, maximum):
            trainer = trainer_of(world, engine, bad if world.rank == 0 else [])
            try:
                return trainer.fit(
                    digits(),
                    steps=30,
                    batch=BATCH,
                    options=FitOptions(interval_steps=4, not_finite="skip", max_skipped=maximum),
                )
            except TrainingError as error:
                return str(error)
            finally:
                trainer.close()

        assert run({2, 3, 5, 6, 8}, 2)["steps"] == 30
        assert re.search(r"The limit is 2 skipped (steps|gradients) in a row", run({2, 3, 4}, 2))

    ranks(body)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["replicated, no overlap", "top-k", "powersgd", "ps-sync"])
def test_a_resumed_run_skips_what_the_uninterrupted_one_skips(tmp_path, name):
    def run(world, out, steps, resume=False):
        trainer = trainer_of(world, TOGETHER[name], [2, 5, 6] if world.rank == 0 else [])
        try:
            trainer.fit(
                digits(),
                steps=steps,
                batch=BATCH,
                out=out,
                resume=resume,
                options=FitOptions(interval_steps=2, not_finite="skip"),
            )
            return state_of(trainer.engine), (trainer.engine.name, rows(out))
        finally:
            trainer.close()

    def rows(out):
        keys = ("step", "skipped_steps", "train_loss", "rate")
        lines = (out / "metrics.jsonl").read_text().splitlines()
        return [[row[key] for key in keys] for row in map(json_of, lines)]

    complete = run_on("threads", 3, lambda w: run(w, tmp_path / "whole", STEPS))
    for steps in (4, 6, STEPS):
        cut = run_on("threads", 3, lambda w, n=steps: run(w, tmp_path / "cut", n, n > 4))
    assert cut == complete
    assert [row[1] for row in complete[0][1][1]] == [0, 1, 2, 3, 3, 3]


def json_of(line: str) -> dict:
    import json

    return json.loads(line)


def test_a_row_of_skipped_steps_alone_tells_no_loss(tmp_path):
    def run(world):
        trainer = trainer_of(world, engines.AllReduce(), range(2, 6))
        summary = trainer.fit(
            digits(),
            steps=6,
            batch=BATCH,
            out=tmp_path / "run",
            options=FitOptions(interval_steps=2, not_finite="skip"),
        )
        return summary["train_loss"], summary["skipped_steps"]

    assert run_on("threads", 2, run) == [(None, 4)] * 2


def test_a_finite_gradient_is_taken_however_large():
    """Alone up to the largest number there is; its square overflows, it does not."""

    def body(world):
        trainer = trainer_of(world, engines.Single(), [BAD], LARGE, optimizer=optim.sgd(1e-30))
        return trainer.fit(
            digits(), steps=STEPS, batch=BATCH, options=FitOptions(not_finite="skip")
        )

    (summary,) = run_on("threads", 1, body)
    assert summary["skipped_steps"] == 0 and summary["status"] == "done"

    def large(world):
        trainer = trainer_of(
            world, engines.AllReduce(), [BAD], LARGE / 5, optimizer=optim.sgd(1e-30)
        )
        return trainer.fit(
            digits(), steps=STEPS, batch=BATCH, options=FitOptions(not_finite="skip")
        )

    assert [item["skipped_steps"] for item in run_on("threads", 2, large)] == [0, 0]


@pytest.mark.parametrize("name", ["single", "single, ordered"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("model", [MLP, RESNET], ids=["mlp", "resnet"])
def test_one_rank_skips(name, value, model):
    engine = engines.Single(reduction="ordered" if "ordered" in name else "fast")
    if model is RESNET and "ordered" in name:
        pytest.skip("blocks have no statistics of a batch")

    def body(world):
        skipped, summary = trained(world, engine, 0, value, model=model)
        assert summary["skipped_steps"] == 1
        assert skipped == trained(world, engine, 0, 0, model=model, without=BAD)[0]

    run_on("threads", 1, body)


@pytest.mark.parametrize("on_ready", [lambda name: None, ignore_ready], ids=["sent", "kept"])
def test_every_slot_is_looked_at(on_ready):
    def body(world):
        for slot in trainer_of(world, engines.Single()).replica.arena.slots:
            replica = ModelReplica(MLP.build((8, 8), 10), 0, np.float32)
            check = GradientCheck(replica, 1)
            for value in VALUES.values():
                check.begin(on_ready)
                assert check.passes({"loss": nn.Total(1.0, 1)})
                replica.arena.views(replica.arena.grad)[slot.name].reshape(-1)[-1] = value
                check.begin(on_ready)
                assert check.passes({"loss": nn.Total(1.0, 1)}) == (value == LARGE)
                assert (
                    value == LARGE or check.fault == f"the gradient of '{slot.name}' is not finite"
                )
                replica.arena.grad[...] = 0

    run_on("threads", 1, body)


@pytest.mark.parametrize("name", ["replicated, no overlap", "overlap", "shard_optimizer"])
def test_every_part_of_a_sum_is_looked_at(name):
    """By some rank; and the rank whose gradient it was is named, with its fault alone."""

    def body(world):
        replica = Planted(ModelReplica(MLP.build((8, 8), 10), 0, np.float32), [0], np.nan)
        engine = TOGETHER[name].build(world, replica, SGD)
        samples = digits()
        part = slice(world.rank, None, world.size)
        task = engines.Task(Batch.of(samples.x[part], samples.y[part]), 1 / 151, nn.Key(0, 0, 0))
        before = engine.replica.arena.param.tobytes()
        for turn, slot in enumerate(replica.arena.slots):
            rank = turn % world.size
            for replica.slot, replica.element in ((slot.name, 0), (slot.name, -1)):
                replica.steps = [0] if world.rank == rank else []
                flags = engine.step(task, engines.Flags())[1]
                assert flags == engines.Flags().with_failure(rank)
                own = f"the gradient of '{slot.name}' is not finite" * (world.rank == rank)
                assert engine.check.fault == own
        assert engine.replica.arena.param.tobytes() == before
        replica.steps = []
        assert engine.step(task, engines.Flags())[1] == engines.Flags()
        assert engine.replica.arena.param.tobytes() != before
        engine.close()

    run_on("threads", 3, body)


ON_GPUS = {
    "single": (1, engines.Single()),
    "overlap": (2, engines.AllReduce(overlap="always", **SMALL)),
    "no overlap": (2, engines.AllReduce(overlap="never")),
    "ordered": (2, engines.AllReduce(reduction="ordered", overlap="always", **SMALL)),
    "powersgd": (2, engines.AllReduce(compression="powersgd", compression_rank=2)),
    "ps-sync": (2, engines.PsSync(placement="colocated")),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ON_GPUS)
def test_on_gpus(lazy_gpu, name, precision):
    """As on cores; without a wait for the whole device or a copy that nobody asked for."""
    size, engine = ON_GPUS[name]

    def body(world):
        skipped, summary = trained(world, engine, size - 1, np.nan, precision=precision)
        expected, _ = trained(world, engine, 0, 0, precision=precision, without=BAD)
        return skipped == expected, summary["skipped_steps"]

    assert run_on_gpus(size, body) == [(True, 1)] * size
    assert lazy_gpu.counts["implicit"] == 0


@pytest.mark.parametrize("overlap", ["never", "always"])
def test_ranks_on_gpus_wait_no_more_than_before(lazy_gpu, monkeypatch, overlap):
    """But for the one number that comes to the host."""
    engine = engines.AllReduce(algorithm="ring", overlap=overlap, **SMALL)
    waits = ("event sync", "stream sync", "device sync", "D2H", "pageable", "implicit")

    def counted(steps):
        def body(world):
            trainer = trainer_of(world, engine)
            trainer.fit(digits(), steps=steps, batch=BATCH, options=FitOptions(interval_steps=100))
            trainer.close()

        before = dict(lazy_gpu.counts)
        run_on_gpus(2, body)
        return {key: lazy_gpu.counts[key] - before.get(key, 0) for key in waits}

    def a_step():
        short, repeated = counted(2), counted(6)
        # Of a rank's step: a single wait, as of a prefetch that came late, is rounded off.
        return {key: round((repeated[key] - short[key]) / 8) for key in waits}

    checked = a_step()
    monkeypatch.setattr(GradientCheck, "passes", lambda *_: True)
    unchecked = a_step()
    extra = {key: checked[key] - unchecked[key] for key in waits if checked[key] != unchecked[key]}
    assert extra == {"event sync": 1, "D2H": 1}


def test_a_gpu_is_asked_once_per_gradient(lazy_gpu):
    """One kernel, one number to the host and one wait, for which there is a step's end."""
    counts = {}

    def body(world):
        for steps in (2, 6):
            before = dict(lazy_gpu.counts)
            trainer = trainer_of(world, engines.Single())
            trainer.fit(digits(), steps=steps, batch=BATCH, options=FitOptions(interval_steps=100))
            counts[steps] = {k: n - before.get(k, 0) for k, n in lazy_gpu.counts.items()}

    run_on_gpus(1, body)
    a_step = {key: (n - counts[2].get(key, 0)) / 4 for key, n in counts[6].items()}
    assert a_step["first_not_finite"] == 1
    assert a_step["event sync"] == 2  # the loss, and this
    assert a_step.get("stream sync", 0) == a_step.get("device sync", 0) == 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_kernel_finds_the_first(gpu, monkeypatch, dtype):
    import on_host

    on_host.install(monkeypatch)
    import cupy

    replica = ModelReplica(MLP.build((8, 8), 10), 0, dtype, on_gpu=True)
    check, arena = GradientCheck(replica, 2), replica.arena
    largest = float(np.finfo(dtype).max)
    slots = {slot.name: slot for slot in arena.slots}
    for name, slot in slots.items():
        for value, fault in {
            np.nan: "not finite",
            -np.inf: "not finite",
            largest: "too large for a sum over 2 ranks",
            largest / 5: "",
        }.items():
            arena.grad[...] = cupy.asarray(np.ones(arena.grad.size, dtype))
            arena.grad[slot.stop - 1 : slot.stop] = value
            check.begin(lambda name: None)
            assert check.passes({"loss": nn.Total(1.0, 1)}) == (not fault)
            assert check.fault == (fault and f"the gradient of '{name}' is {fault}")
    assert int(check._first_fault.get()[0]) == finite.NO_FAULT


def test_backup_workers_do_not_mind_what_comes_too_late():
    """The slow worker's gradients are bad, and late: nobody takes them anyway."""
    made = [0] * 4

    class Late(Planted):
        """Rank 2 waits for the gradients of all others, and then until they are taken."""

        def __init__(self, replica, steps, value, rank):
            super().__init__(replica, steps, value)
            self.rank = rank

        def gradient(self, batch, scale, key, on_ready):
            while self.rank == 2 and sum(n > key.step for n in made) < 2:
                time.sleep(1e-3)
            time.sleep(0.1 if self.rank == 2 else 0.01)
            sums = super().gradient(batch, scale, key, on_ready)
            made[self.rank] = key.step + 1
            return sums

    def body(world):
        trainer = Trainer.__new__(Trainer)
        bad = range(1000) if world.rank == 2 else []
        trainer._slowed_replica = lambda faults: Late(trainer.replica, bad, np.nan, world.rank)
        trainer.__init__(MLP.build((8, 8), 10), SGD, engines.PsSync(backup_workers=1), world=world)
        summary = trainer.fit(
            digits(), steps=60, batch=BATCH, options=FitOptions(interval_steps=30)
        )
        trainer.close()
        assert np.isfinite(trainer.replica.arena.param).all()
        return summary["steps"], summary["dropped_gradients"] > 2

    assert run_on("threads", 4, body) == [(60, True)] * 4


def test_a_replay_drops_the_same(tmp_path):
    def run(world, out, replay=None):
        bad = [2, 3, 5] if world.rank == 0 else []
        trainer = trainer_of(world, engines.PsAsync(), bad)
        summary = trainer.fit(
            digits(),
            steps=8,
            batch=BATCH,
            out=out,
            replay=replay,
            options=FitOptions(interval_steps=4, not_finite="skip"),
        )
        trainer.close()
        return [summary[key] for key in ("params_sha256", "dropped_gradients", "train_loss")]

    first = run_on("threads", 3, lambda w: run(w, tmp_path / "first"))
    again = run_on("threads", 3, lambda w: run(w, tmp_path / "again", tmp_path / "first"))
    assert first == again and first[0][1] > 0


REFUSED = [
    (["run.max_skipped=3"], r"\[run\] max_skipped: expected not_finite = 'skip' beside it"),
    (["run.not_finite=ignore"], r"\[run\] not_finite"),
    (["run.not_finite=skip", "run.max_skipped=0"], r"\[run\] max_skipped"),
]


@pytest.mark.parametrize(("keys", "fault"), REFUSED)
def test_a_recipe_is_refused(keys, fault):
    with pytest.raises(UsageError, match=fault):
        recipe.load("digits", keys)


def test_a_recipe_skips(tmp_path, monkeypatch):
    """As a user asks for it: the keys of a recipe reach the loop."""
    good = ModelReplica.gradient

    def gradient(self, batch, scale, key, on_ready):
        def ready(name):
            if key.step in (1, 2, 4):
                self.arena.views(self.arena.grad)[name][...] = np.nan
            on_ready(name)

        return good(self, batch, scale, key, ready)

    monkeypatch.setattr(ModelReplica, "gradient", gradient)
    keys = ["run.epochs=", "run.steps=6", "model.widths=[64,8,10]", "run.not_finite=skip"]

    def train(world, maximum):
        spec = recipe.load("digits", [*keys, f"run.max_skipped={maximum}"])
        return runs.train(spec, world, tmp_path / str(maximum), False)["skipped_steps"]

    assert run_on("threads", 2, lambda w: train(w, 2)) == [3, 3]
    with pytest.raises(TrainingError, match="The limit is 1 skipped step in a row"):
        run_on("threads", 1, lambda w: train(w, 1))
