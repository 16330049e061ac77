"""The best checkpoint: never removed, loaded on request, replaced by the next best if damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from ranks import on_ranks, run_on

from hpctrain import checkpoint, nn, optim
from hpctrain.checkpoint import Piece
from hpctrain.commands.checkpoint import checkpoint as command
from hpctrain.commands.checkpoint import evaluate
from hpctrain.core.errors import StoppedError, UsageError
from hpctrain.core.metrics import Criterion
from hpctrain.core.run_files import run_folder
from hpctrain.core.signals import StopRequest
from hpctrain.data import Dataset
from hpctrain.training import recipe, runs
from hpctrain.training.run_options import CheckpointOptions
from hpctrain.training.trainer import Trainer
from hpctrain.transport.threads.ranks import run_ranks

ACCURACY, LOSS = Criterion("test_accuracy", "max"), Criterion("test_loss", "min")


def save(run, step, metrics, keep=1, keep_best=ACCURACY, size=1):
    def rank(link):
        x = np.full(8, step, np.float64)
        own = [Piece("param", 4 * link.rank, 4 * size, x[:4])]
        about = {
            "metrics": metrics,
            "keep_best": keep_best and keep_best._asdict(),
            "world_size": size,
        }
        return checkpoint.save(run, step, own, about, link, keep, keep_best)

    return run_ranks(size, rank)[0]


def steps(run):
    return [result.step for result in checkpoint.listing(run) if not result.set_aside]


# Values by step, the metric, its direction -> the steps that stay with keep = 1, the best
SAVED = {
    "rises": ([0.1, 0.2, 0.3], ACCURACY, [3], 3),
    "falls": ([0.3, 0.2, 0.1], ACCURACY, [1, 3], 1),
    "falls, a loss": ([0.3, 0.2, 0.1], LOSS, [3], 3),
    "in the middle": ([0.1, 0.3, 0.2, 0.2], Criterion("train_accuracy", "max"), [2, 4], 2),
    "rises, a loss": ([0.1, 0.3, 0.2, 0.2], Criterion("train_loss", "max"), [2, 4], 2),
    "equals": ([0.1, 0.3, 0.3, 0.1], ACCURACY, [2, 4], 2),
    "not made": ([0.1, None, None], ACCURACY, [1, 3], 1),
    "not finite": ([float("nan"), 2.0, float("inf")], LOSS, [2, 3], 2),
}


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("size", [1, 2])
def test_the_best_is_never_pruned(tmp_path, saved, size):
    values, criterion, stay, best = SAVED[saved]
    metric = criterion.metric
    for step, value in enumerate(values, 1):
        save(tmp_path, step, {metric: value}, keep_best=criterion, size=size)
    assert steps(tmp_path) == stay
    for link_size in (1, 3):
        loaded = run_ranks(link_size, lambda link: checkpoint.load(tmp_path, link, best=True))
        assert [(item.step, set(item.arrays["param"])) for item in loaded] == [
            (best, {float(best)})
        ] * link_size
    message = CliRunner().invoke(command, ["list", str(tmp_path)]).output.splitlines()
    assert [f"(best {metric}: " in line for line in message] == [step == best for step in stay]


def test_a_damaged_best_is_set_aside_and_the_next_best_taken(tmp_path, caplog):
    for step, value in enumerate([0.1, 0.4, 0.5, 0.3], 1):
        save(tmp_path, step, {"test_accuracy": value}, keep=4)
    os.truncate(tmp_path / "checkpoints" / "step-00000003" / "part-00000.safetensors", 50)
    loaded = run_ranks(2, lambda link: checkpoint.load(tmp_path, link, best=True))
    assert [item.step for item in loaded] == [2, 2]
    assert "step-00000003 is damaged, set aside" in caplog.text
    assert steps(tmp_path) == [1, 2, 4]


def test_a_damaged_best_is_found_out_when_a_run_goes_on(tmp_path, caplog):
    for step, value in enumerate([0.1, 0.4, 0.5, 0.3], 1):
        save(tmp_path, step, {"test_accuracy": value}, keep=4)
    os.truncate(tmp_path / "checkpoints" / "step-00000003" / "part-00000.safetensors", 50)
    observed = run_ranks(2, lambda link: checkpoint.best_value(tmp_path, ACCURACY, link))
    assert observed == [0.4, 0.4]
    assert caplog.text.count("the best checkpoint is damaged, set aside") == 1
    assert run_ranks(2, lambda link: checkpoint.best_value(tmp_path, LOSS, link)) == [
        None,
        None,
    ]


def test_a_run_that_keeps_no_best_has_none_to_load(tmp_path):
    save(tmp_path, 1, {"test_accuracy": 0.5}, keep_best=None)
    with pytest.raises(UsageError, match="keeps no best checkpoint; train with"):
        run_ranks(2, lambda link: checkpoint.load(tmp_path, link, best=True))


OVERRIDES = ["checkpoint.keep_best=test_loss", "checkpoint.every_epochs=", "checkpoint.keep=1",
             "optimizer.rate=2.0", "schedule.kind=constant"]  # fmt: skip


@on_ranks(1, 3, mpi=(2,))
def test_a_run_saves_the_best_when_it_is_made(ranks, tmp_path):
    spec = recipe.load("digits", ["run.epochs=8", "model.widths=[64,16,10]", *OVERRIDES])

    def body(world):
        out = Path(world.gather(str(tmp_path / "run"))[0])
        runs.train(spec, world, out, False)
        return out

    for out in ranks(body)[:1]:
        by_loss = min(run_folder.rows(out), key=lambda row: row["test_loss"])
        assert by_loss["step"] < 96  # else the test shows nothing
        assert steps(out) == [by_loss["step"], 96]
        evaluated = runs.evaluate(out, best=True)
        assert evaluated["step"] == by_loss["step"]
        assert evaluated["test_loss"] == pytest.approx(by_loss["test_loss"], rel=1e-5)
        assert runs.evaluate(out)["step"] == 96
        best, newest = runs.load(out, best=True), runs.load(out)
        assert (best.replica.arena.param != newest.replica.arena.param).any()


def fit(world, out, resume):
    samples = drawn()
    trainer = Trainer(nn.Model({"out": nn.Linear(3)}, (4,)), optim.sgd(2.0), world=world)
    return trainer.fit(
        samples, epochs=6, batch=10, evaluate=samples, out=out, resume=resume,
        checkpoints=CheckpointOptions(keep=None, keep_best="test_loss"),
    )  # fmt: skip


def drawn():
    random = np.random.default_rng(0)
    return Dataset(random.normal(size=(40, 4)).astype(np.float32), random.integers(3, size=40))


@pytest.mark.sample(1)
@pytest.mark.parametrize("at", [2, 6, 13, 21])
def test_a_resumed_run_keeps_the_best_of_the_whole_one(tmp_path, monkeypatch, at):
    run_on("threads", 2, lambda w: fit(w, tmp_path / "whole", False))
    observed = iter(range(10**6))
    monkeypatch.setattr(
        StopRequest,
        "requested",
        property(lambda s: next(observed) >= 2 * at, lambda s, v: None),
        False,
    )
    with pytest.raises(StoppedError):
        run_on("threads", 2, lambda w: fit(w, tmp_path / "cut", False))
    monkeypatch.undo()
    stopped = checkpoint.listing(tmp_path / "cut")[-1]
    assert stopped.step == at + 1 and stopped.step % 4  # in the middle of an epoch:
    assert set(stopped.about["metrics"].values()) == {None}  # it takes part in no comparison
    run_on("threads", 2, lambda w: fit(w, tmp_path / "cut", True))
    created = steps(tmp_path / "whole")
    assert len(created) < 6  # else every epoch was the best
    assert [step for step in steps(tmp_path / "cut") if step != stopped.step] == created


def test_a_best_without_a_test_set_is_refused(tmp_path):
    def body(world):
        model = nn.Model({"out": nn.Linear(3)}, (4,))
        options = CheckpointOptions(keep_best="test_loss")
        Trainer(model, optim.sgd(0.1), world=world).fit(drawn(), epochs=1, checkpoints=options)

    with pytest.raises(UsageError, match="keep_best needs test_loss, but there is no test set"):
        run_on("threads", 2, body)


def test_the_command_evaluates_the_best(tmp_path):
    spec = recipe.load("digits", ["run.epochs=8", "model.widths=[64,16,10]", *OVERRIDES])
    run_on("threads", 1, lambda w: runs.train(spec, w, tmp_path / "run", False))
    reported = [
        json.loads(CliRunner().invoke(evaluate, [str(tmp_path / "run"), *extra]).output)
        for extra in ([], ["--best"])
    ]
    assert reported[1]["step"] < reported[0]["step"] == 96
    assert reported[1]["test_loss"] < reported[0]["test_loss"]
