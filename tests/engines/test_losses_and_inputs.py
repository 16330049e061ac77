"""Models with real targets, several labels, weighted targets and two inputs, under every engine.

Synchronous engines equal one rank as in test_equal_to_one_rank.py; the others lower the loss. The
same runs from recipes have the same bytes as those from Python.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from ranks import on_ranks, run_on

from hpctrain import data, engines, nn, optim
from hpctrain.commands.checkpoint import evaluate
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.training import recipe, runs
from hpctrain.training.run_options import CheckpointOptions, FitOptions
from hpctrain.training.trainer import Trainer

STEPS, SAMPLES, BATCH, RATE = 12, 151, 37, 0.05  # the last batch has 3 samples
#: Engines whose ranks together make the updates of one rank, with plain SGD
EQUAL = {
    "allreduce": lambda: engines.AllReduce(bucket_bytes=128),
    "shards": lambda: engines.AllReduce(shard_optimizer=True, bucket_bytes=128),
    "shared": lambda: engines.AllReduce(share_parameters=True),
    "priority": lambda: engines.AllReduce(priority=True, bucket_bytes=128),
    "ordered": lambda: engines.AllReduce(reduction="ordered", blocks=5),
    "ps-sync": lambda: engines.PsSync(),
    "averaged": lambda: engines.LocalSgd(period=1),
}
OTHERS = {
    "ps-async": lambda: engines.PsAsync(),
    "local-sgd": lambda: engines.LocalSgd(period=3),
    "easgd": lambda: engines.Easgd(period=2),
    "gossip": lambda: engines.Gossip(graph="bipartite"),
}


class WeightedError:
    """The squared error of one feature; targets are (values, weights), both (n,)."""

    terms = ("loss", "weight")
    metrics = {  # noqa: RUF012
        "loss": lambda sums: sums["loss"].mean,
        "weighted": lambda sums: sums["loss"].sum / sums["weight"].sum,
    }

    def __call__(self, outputs, targets, scale=None):
        values, weights = targets
        error = outputs[:, 0] - values
        n = len(values)
        total = float((weights * error**2).sum())
        sums = {"loss": nn.Total(total, n), "weight": nn.Total(float(weights.sum()), n)}
        gradient = None if scale is None else (2 * scale * weights * error)[:, None]
        return sums, gradient if gradient is None else gradient.astype(outputs.dtype)

    def find_fault(self, targets, output_shape):
        return "" if (targets[1] > 0).all() else "expected weights above 0"

    def count_outputs(self, targets):
        return 1


@cache
def samples(name: str) -> data.Dataset:
    draw = np.random.default_rng(7)
    x = draw.standard_normal((SAMPLES, 6)).astype(np.float32)
    values = (x @ np.arange(6) / 6 + 0.5 + draw.standard_normal(SAMPLES) / 10).astype(np.float32)
    targets = {
        "regression": values,
        "labels": (x @ draw.standard_normal((6, 3)) > 0).astype(np.uint8),
        "weights": (values, np.linspace(0.5, 1.5, SAMPLES)),
        "two inputs": np.arange(SAMPLES) % 3,
    }[name]
    if name == "two inputs":
        image = draw.standard_normal((SAMPLES, 4, 5)) + (np.arange(SAMPLES) % 3)[:, None, None]
        return data.Dataset({"image": image.astype(np.float32), "facts": x}, targets)
    return data.Dataset(x, targets)


def model(name: str) -> nn.Model:
    if name == "two inputs":
        both = nn.Concatenate({
            "image": {"flat": nn.Flatten(), "linear": nn.Linear(7), "relu": nn.ReLU()},
            "facts": {"linear": nn.Linear(4), "dropout": nn.Dropout(0.2)},
        })  # fmt: skip
        return nn.Model([both, nn.ReLU(), nn.Linear(3)], {"image": (4, 5), "facts": (6,)})
    loss = {"regression": "mean_squared_error", "labels": "binary_cross_entropy",
            "weights": WeightedError()}[name]  # fmt: skip
    outputs = 3 if name == "labels" else 1
    return nn.Model([nn.Linear(8), nn.ReLU(), nn.Linear(outputs)], 6, loss)


MODELS = ("regression", "labels", "weights", "two inputs")


def fit(world, name, engine, precision="float64", **extra):
    """Return the parameters and the summary after training."""
    trainer = Trainer(model(name), optim.sgd(RATE), engine, precision=precision, world=world)
    options = FitOptions(interval_steps=4, evaluate_steps=4)
    keys = {"steps": STEPS, "batch": BATCH, "evaluate": samples(name), "options": options}
    start = trainer.evaluate(samples(name))["loss"]
    summary = trainer.fit(samples(name), **{**keys, **extra})
    metrics = trainer.evaluate(samples(name))
    param = trainer.replica.arena.param.copy() if trainer.engine.worker is not None else None
    trainer.close()
    assert {f"test_{key}": value for key, value in metrics.items()}.items() <= summary.items()
    return param, summary, start


@cache
def one_rank(name):
    return run_on("threads", 1, lambda world: fit(world, name, engines.Single()))[0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", EQUAL)
@on_ranks(2, 3, 5, mpi=(2, 4))
def test_p_ranks_equal_one_rank(ranks, way, name):
    expected, reference, _ = one_rank(name)
    for param, summary, _ in ranks(lambda world: fit(world, name, EQUAL[way]())):
        if param is not None:  # a worker's
            np.testing.assert_allclose(param, expected, rtol=0, atol=1e-11)
        for key in [key for key in reference if key.startswith(("test_", "train_"))]:
            assert summary[key] == pytest.approx(reference[key], rel=1e-9)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", OTHERS)
@on_ranks(4, mpi=(4,))
def test_other_engines_lower_the_loss(ranks, way, name):
    for _, summary, start in ranks(lambda world: fit(world, name, OTHERS[way](), steps=60)):
        assert summary["test_loss"] < 0.9 * start


@pytest.mark.parametrize("name", MODELS)
def test_metrics_of_each_loss(name):
    """By their definitions, from the outputs of the whole set."""

    def body(world):
        trainer = Trainer(model(name), optim.sgd(RATE), precision="float64", world=world)
        trainer.fit(samples(name), steps=20, batch=BATCH)
        return trainer.predict(samples(name).x), trainer.evaluate(samples(name))

    outputs, metrics = run_on("threads", 2, body)[0]
    y = samples(name).y
    del metrics["loss"]
    if name == "regression":
        errors, deviations = outputs[:, 0] - y, y - y.mean(dtype="f8")
        rmse, r2 = np.sqrt((errors**2).mean()), 1 - (errors**2).sum() / (deviations**2).sum()
        assert metrics == pytest.approx({"rmse": rmse, "r2": r2}, rel=1e-6)
    elif name == "weights":
        values, weights = y
        mean = (weights * (outputs[:, 0] - values) ** 2).sum() / weights.sum()
        assert metrics == pytest.approx({"weighted": mean}, rel=1e-9)
    else:
        right = (outputs > 0) == y if name == "labels" else outputs.argmax(axis=1) == y
        assert metrics == {"accuracy": pytest.approx(right.mean())}


CODE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_losses_and_inputs as source


def load(name):
    return source.samples(name), source.samples(name)


def build(input_shape, outputs, name):
    model = source.model(name)
    assert model.input_shape == input_shape
    assert outputs in (None, model.output_shape[-1]), outputs
    return model
"""


def written(folder: Path, name: str, engine: dict) -> recipe.Recipe:
    """Return the recipe of a run, with its functions in `folder`."""
    (folder / "targets_code.py").write_text(CODE)
    loss = {"regression": "mean_squared_error", "labels": "binary_cross_entropy"}
    tables = {
        "schema": 1,
        "run": {"name": "r", "steps": STEPS, "interval_steps": 4, "evaluate_steps": 4,
                "precision": "float64"},
        "model": {"kind": "targets_code:build", "name": name},
        "data": {"kind": "targets_code:load", "name": name},
        "optimizer": {"kind": "sgd", "rate": RATE, "batch": BATCH},
        "engine": engine,
    }  # fmt: skip
    if name == "labels" or (name in loss and engine["kind"] != "gossip"):  # its model has a loss
        tables["loss"] = {"kind": loss[name]}
        tables["checkpoint"] = {"keep_best": "test_rmse" if name == "regression" else "test_loss"}
    return recipe.check(tables, folder)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["allreduce", "ps-sync", "ps-async", "local-sgd", "easgd",
                                  "gossip"])  # fmt: skip
def test_runs_of_recipes(tmp_path, monkeypatch, kind, name):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "targets_code", raising=False)
    spec = written(tmp_path, name, {"kind": kind})
    out = tmp_path / "run"
    summary = run_on("threads", 4, lambda world: runs.train(spec, world, out, False))[0]
    if kind == "allreduce":
        by_python = run_on("threads", 4, lambda world: fit(world, name, engines.AllReduce()))[0][1]
        assert summary["params_sha256"] == by_python["params_sha256"]
    result = json.loads(CliRunner().invoke(evaluate, [str(out), "--trust"]).output)
    for key in [key for key in result if key.startswith("test_")]:
        assert result[key] == pytest.approx(summary[key], rel=1e-6)
    loaded = runs.load(out, trust=True)
    assert loaded.evaluate(samples(name))["loss"] == pytest.approx(summary["test_loss"], rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2, mpi=(2,))
def test_an_interval_that_is_open_is_resumed(ranks, tmp_path, name):
    """The sums of a row lie in the checkpoint by name, whatever the loss."""

    def body(world):
        folder = Path(world.gather(str(tmp_path))[0])
        save = {"checkpoints": CheckpointOptions(every_steps=3), "out": folder / "cut"}
        fit(world, name, engines.AllReduce(), steps=6, **save)
        _, resumed, _ = fit(world, name, engines.AllReduce(), resume=True, **save)
        _, complete, _ = fit(world, name, engines.AllReduce(), out=folder / "complete")
        assert resumed["params_sha256"] == complete["params_sha256"]
        keys = [key for key in complete if key.startswith(("test_", "train_"))]
        return [[of[key] for key in keys] for of in (resumed, complete)]

    for resumed, complete in ranks(body):
        assert resumed == pytest.approx(complete, rel=1e-12)


X = np.ones((4, 6), np.float32)
REFUSED = {
    "real numbers as labels": ("cross_entropy", X[:, 0], "training set: cross_entropy: expected "
                               "integer class labels, seen float32.*mean_squared_error"),
    "a label too large": ("cross_entropy", np.array([0, 1, 2, 3]), "label 3 of sample 3 is out of "
                          r"range; expected labels in 0 \.\. 2"),
    "a label below 0": ("cross_entropy", np.array([0, -1, 2, 0]), "label -1 of sample 1"),
    "one-hot": ("cross_entropy", np.eye(4, dtype=int), r"expected labels of shape \(4,\), .* seen "
                r"\(4, 4\)"),
    "a column": ("cross_entropy", np.zeros((4, 1), int), r"seen \(4, 1\); use y\[:, 0\]"),
    "features": ("mean_squared_error", X[:, :2], r"expected targets \(n, 3\), .* seen \(4, 2\)"),
    "one feature of three": ("mean_squared_error", X[:, 0], r"\(n, 3\), .* seen \(4,\)"),
    "probabilities": ("binary_cross_entropy", X[:, :3] * 2, "from 0 to 1, seen 2.0 in sample 0"),
    "several arrays": ("cross_entropy", (X[:, 0], X[:, 1]), "expected one array of labels, seen a "
                       "tuple"),
    "a dict": ("mean_squared_error", {"a": X}, "one array of targets, seen a dict of arrays"),
    "class numbers": ("binary_cross_entropy", np.arange(4), r"\(n, 3\), .* seen \(4,\)"),
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", REFUSED)
@on_ranks(2, mpi=(2,))
def test_targets_are_checked_before_training(ranks, case):
    loss, y, message = REFUSED[case]

    def body(world):
        trainer = Trainer(nn.Model([nn.Linear(3)], 6, loss), optim.sgd(0.1), world=world)
        with pytest.raises(UsageError, match=message):
            trainer.fit((X, y), steps=1, batch=4)
        with pytest.raises(UsageError, match="evaluated set: "):  # on all ranks, whoever has them
            trainer.evaluate((X, y))
        valid = np.zeros(4, int) if loss == "cross_entropy" else np.zeros((4, 3))
        with pytest.raises(UsageError, match=f"test set: .*{message[message.index(':') + 2 :]}"
                           if message.startswith("training") else "test set"):  # fmt: skip
            trainer.fit((X, valid), steps=1, batch=4, evaluate=(X, y))
        trainer.close()
        return True

    assert all(ranks(body))


def test_inputs_that_do_not_fit():
    both = nn.Concatenate({"a": {"l": nn.Linear(2)}, "b": {}})
    with pytest.raises(UsageError, match="expected a dict of arrays a, b per sample, seen a, c"):
        nn.Model([both, nn.Linear(2)], {"a": (3,), "c": (4,)})
    with pytest.raises(UsageError, match=r"seen one of shape \(3,\)"):
        nn.Model([both, nn.Linear(2)], 3)
    with pytest.raises(UsageError, match="outputs alike but for the last axis"):
        nn.Model([both, nn.Linear(2)], {"a": (3,), "b": (4, 3)})
    net = nn.Model([both, nn.Linear(2)], {"a": (3,), "b": (4,)})

    def body(world, x, y):
        with Trainer(net, optim.sgd(0.1), world=world) as trainer:
            trainer.fit((x, y), steps=1, batch=2)

    a, y = np.ones((3, 3)), np.array([0, 1, 0])
    for b, message in [
        (np.ones((2, 4)), r"x\['a'\] has 3 samples but x\['b'\] has 2"),
        (np.ones((3, 5)), r"samples of shape \{'a': \(3,\), 'b': \(4,\)\}, seen"),
        (np.full((3, 4), np.nan), r"x\['b'\] holds nan in sample 0"),
        ((), r"samples of shape .*, seen \{'a': \(3,\), 'b': \(\)\}"),
    ]:
        with pytest.raises(UsageError, match=message):
            run_on("threads", 1, lambda world: body(world, {"a": a, "b": b}, y))  # noqa: B023


@pytest.mark.parametrize(("x", "y", "name"), [({}, np.ones(2), "x"), (np.ones((2, 2)), (), "y")])
def test_no_arrays(x, y, name):
    with pytest.raises(UsageError, match=f"{name} holds no array"):
        data.Dataset(x, y)


def test_a_set_of_ones_own_gives_equal_lengths():
    class Uneven(data.Dataset):
        def rows(self, indexes, epoch=0):
            x, y = super().rows(indexes, epoch)
            return x, y[:-1]

    def body(world):
        with Trainer(model("regression"), optim.sgd(0.1), world=world) as trainer:
            source = samples("regression")
            trainer.fit(Uneven(source.x, source.y), steps=1, batch=4)

    with pytest.raises(HpctrainError, match=r"arrays of 4 samples, .* seen 3 in \(x, y\)\[1\]"):
        run_on("threads", 1, body)
