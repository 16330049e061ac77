"""Metrics of the test set equal scikit-learn's on the whole set, on any ranks and engines.

Samples are small integers and parameters multiples of 1/4, so logits are exact, many are equal, and
all ranks must return the same bytes. Rows of engines have any parameters.
"""

from __future__ import annotations

import json
import logging
import math
import re
from functools import cache

import numpy as np
import pytest
from ranks import on_ranks, run_on
from sklearn import metrics as sklearn

import hpctrain as ht
from hpctrain import data, engines, nn
from hpctrain.core.errors import UsageError
from hpctrain.nn.metrics import auc, counts
from hpctrain.nn.metrics.scores import Scores, Task
from hpctrain.training.evaluation import Evaluation
from hpctrain.training.trainer import Trainer

SAMPLES = 83
ALL = {
    "two classes": ("auc", "f1", "f1_macro", "f1_micro", "confusion"),
    "classes": ("auc", "f1-macro", "f1_micro", "top-2", "top_3", "confusion"),
    "one logit": ("confusion", "f1_macro", "f1", "auc"),
    "labels": ("auc", "f1_macro", "f1_micro"),
    "positions": ("auc", "f1_macro", "top_2", "confusion"),
}
CLASSES = {"two classes": 2, "classes": 5, "one logit": 1, "labels": 3, "positions": 4}
ENGINES = {
    "ring": lambda: engines.AllReduce(algorithm="ring"),
    "shards": lambda: engines.AllReduce(shard_optimizer=True),
    "ordered": lambda: engines.AllReduce(reduction="ordered", blocks=5),
    "ps-sync": lambda: engines.PsSync(),
    "ps-async": lambda: engines.PsAsync(),
    "local-sgd": lambda: engines.LocalSgd(period=3),
    "easgd": lambda: engines.Easgd(period=2),
    "gossip": lambda: engines.Gossip(graph="bipartite"),
}


@cache
def samples(task: str, n: int = SAMPLES) -> data.Dataset:
    draw = np.random.default_rng(3)
    shape = (n, 3, 4) if task == "positions" else (n, 4)
    x = draw.integers(0, 3, shape).astype(np.float64)
    y = draw.integers(0, CLASSES[task], shape[:-1])
    y[: CLASSES[task]] = np.arange(CLASSES[task]).reshape(-1, *[1] * (y.ndim - 1))
    if task == "one logit":
        y = draw.integers(0, 2, n)
    elif task == "labels":
        y = draw.integers(0, 2, (n, 3))
    return data.Dataset(x, y)


def model(task: str) -> nn.Model:
    loss = "binary_cross_entropy" if task in ("one logit", "labels") else "cross_entropy"
    layer = nn.Linear(CLASSES[task], per_position=task == "positions")
    return nn.Model([layer], samples(task).sample_shape, loss)


def round_parameters(trainer) -> None:
    """Make all logits exact: sums of multiples of 1/4."""
    param = trainer.replica.arena.param
    param[:] = np.round(4 * param) / 4


def evaluated(world, task, n=SAMPLES, engine="allreduce", **keys):
    """Return the metrics and the outputs for the whole set."""
    with Trainer(
        model(task), "sgd", engine, seed=1, precision="float64", world=world, metrics=ALL[task],
        **keys,
    ) as trainer:  # fmt: skip
        if engine == "allreduce":
            round_parameters(trainer)
        else:
            trainer.fit(samples(task), steps=4, batch=16)
        metrics, outputs = trainer.evaluate(samples(task, n)), trainer.predict(samples(task, n).x)
        return metrics, outputs if trainer.engine.worker is not None else None


def expected_metrics(task, outputs, y) -> dict:
    """Return the values of scikit-learn; its AUC of classes needs their probabilities."""
    names = [name.replace("-", "_") for name in ALL[task]]
    if task == "one logit":
        z, predicted = outputs[:, 0], (outputs[:, 0] > 0).astype(int)
        area = sklearn.roc_auc_score(y, z)
    elif task == "labels":
        predicted, area = (outputs > 0).astype(int), sklearn.roc_auc_score(y, outputs)
    else:
        z, y = outputs.reshape(-1, outputs.shape[-1]), y.ravel()
        predicted = z.argmax(axis=1)
        p = np.exp(z - z.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        p = p[:, 1] if p.shape[1] == 2 else p
        area = sklearn.roc_auc_score(y, p, multi_class="ovr")
    expected = {"auc": area}
    for name in names:
        if name.startswith("f1"):
            average = name[3:] or "binary"
            expected[name] = sklearn.f1_score(y, predicted, average=average, zero_division=np.nan)
        if name.startswith("top"):
            labels = np.arange(z.shape[1])
            expected[name] = sklearn.top_k_accuracy_score(y, z, k=int(name[4:]), labels=labels)
        if name == "confusion":
            expected[name] = sklearn.confusion_matrix(y, predicted).tolist()
    return {name: expected[name] for name in names}


def check(task, results, n=SAMPLES) -> None:
    """Fail unless every rank has the same values, and a worker's are those of scikit-learn."""
    same = {name.replace("-", "_") for name in ALL[task]}
    assert all(m[name] == results[0][0][name] for m, _ in results for name in same)
    for metrics, outputs in results:
        if outputs is None:  # a server has no trained model
            continue
        expected = expected_metrics(task, outputs, samples(task, n).y)
        assert [name for name in metrics if name not in ("loss", "accuracy")] == [*expected]
        assert metrics.get("confusion") == expected.pop("confusion", None)
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-14)


@cache
def one_rank(task, n) -> dict:
    return run_on("threads", 1, lambda world: evaluated(world, task, n))[0][0]


@pytest.mark.parametrize("n", [SAMPLES, 11])
@pytest.mark.parametrize("task", ALL)
@on_ranks(1, 2, 3, 4, 5)
def test_metrics_equal_those_of_scikit_learn(ranks, task, n):
    results = ranks(lambda world: evaluated(world, task, n))
    check(task, results, n)
    own = {name.replace("-", "_") for name in ALL[task]}
    for metrics, _ in results:
        for name in own:  # the same bytes; the loss is a sum of rounded numbers
            assert metrics[name] == one_rank(task, n)[name]


@pytest.mark.sample(4)
@pytest.mark.parametrize("task", ["classes", "labels"])
@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2, 4, 5, mpi=(4,))
def test_metrics_of_every_engine(ranks, engine, task):
    check(task, ranks(lambda world: evaluated(world, task, engine=ENGINES[engine]())))


@on_ranks(2, 4, mpi=(4,))
def test_metrics_of_a_pipeline(ranks):
    def body(world):
        mesh = ht.parallel.MeshOptions(pipe=2)
        layers = [nn.Linear(6), nn.ReLU(), nn.Linear(CLASSES["classes"])]
        keys = {"precision": "float64", "world": world, "metrics": ALL["classes"], "mesh": mesh}
        with Trainer(nn.Model(layers, 4), "sgd", **keys) as trainer:
            return trainer.evaluate(samples("classes")), trainer.predict(samples("classes").x)

    check("classes", ranks(body))


PLANTED = {
    "ties count nothing": (auc, "area", lambda s, p: (
        np.sort(s[~p]).searchsorted(s[p]).sum() / (p.sum() * (~p).sum()))),
    "each share begins at row 0": (Evaluation, "_first_row", lambda self, samples: 0),
    "a logit of 0 is a prediction": (Scores, "of", lambda task, outputs, targets: Scores(
        np.hstack([0 * outputs, outputs + 1e-300]), targets, np.zeros(2))),
    "true and predicted swapped": (counts, "_pairs", lambda scores: (
        scores.logits.argmax(axis=1), scores.truth)),
}  # fmt: skip


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_errors_are_seen(kind, monkeypatch):
    owner, name, function = PLANTED[kind]
    monkeypatch.setattr(owner, name, function)
    with pytest.raises(AssertionError):
        check("one logit", run_on("threads", 2, lambda world: evaluated(world, "one logit")))


def with_metrics(world, layers, y, names, loss="cross_entropy", x=None):
    x = np.arange(len(y), dtype=np.float32)[:, None] if x is None else x
    with Trainer(nn.Model(layers, 1, loss), "sgd", world=world, metrics=names) as trainer:
        return trainer.evaluate((x, y))


UNDEFINED = {
    "one class of two": (2, np.ones(6, int), "auc", "targets of a single class"),
    "a class is missing": (3, np.array([0, 2, 0, 2]), "auc", "class 1 has only positive or only"),
    "no class 1": (2, np.zeros(4, int), "f1", "no target and no prediction is class 1"),
    "soft labels": (1, np.array([0, 1, 0.5, 1]), "auc", "1 targets are no class of the model"),
}


@pytest.mark.parametrize("kind", UNDEFINED)
@pytest.mark.parametrize("size", [1, 3])
def test_undefined_metrics_are_none_and_said_once(kind, size, caplog):
    outputs, y, name, reason = UNDEFINED[kind]
    loss = "binary_cross_entropy" if outputs == 1 else "cross_entropy"

    def body(world):
        with Trainer(nn.Model([nn.Linear(outputs)], 1, loss), "sgd", world=world,
                     metrics=[name]) as trainer:  # fmt: skip
            trainer.replica.arena.param[:] = 0  # class 0 is predicted
            x = np.ones((len(y), 1), np.float32)
            return trainer.fit((x, y), epochs=2, batch=len(y), evaluate=(x, y))

    caplog.set_level(logging.WARNING, "hpctrain")
    if kind == "no class 1":  # which the first update would predict otherwise
        body_of_kind = lambda world: {"test_f1": one(world, outputs, y, name)}  # noqa: E731
    else:
        body_of_kind = body
    for summary in run_on("threads", size, body_of_kind):
        assert summary[f"test_{name}"] is None
    lines = [r.getMessage() for r in caplog.records if "is not defined" in r.getMessage()]
    assert len(lines) == 1 and reason in lines[0]


def one(world, outputs, y, name):
    with Trainer(nn.Model([nn.Linear(outputs)], 1), "sgd", world=world, metrics=[name]) as trainer:
        trainer.replica.arena.param[:] = 0
        return trainer.evaluate((np.ones((len(y), 1), np.float32), y))[name]


def test_metrics_of_outputs_that_are_not_finite_are_none():
    def body(world):
        with Trainer(nn.Model([nn.Linear(3)], 1), "sgd", world=world,
                     metrics=["f1_macro"]) as trainer:  # fmt: skip
            trainer.replica.arena.param[:] = np.nan
            return trainer.evaluate((np.ones((6, 1), np.float32), np.arange(6) % 3))["f1_macro"]

    assert run_on("threads", 2, body) == [None, None]


REGRESSION = {"loss": "mean_squared_error", "y": np.linspace(0, 1, 6)}
CLASSIFIED = {"y": np.arange(6) % 3, "loss": "cross_entropy"}
LABELLED = {"y": np.eye(3, dtype=int), "loss": "binary_cross_entropy"}
NAMED = {"y": {"a": np.zeros(2, int), "b": np.zeros(2, int)}, "loss": "cross_entropy"}
REFUSED = {
    "one-hot": (["auc"], {"y": np.eye(3), "loss": "cross_entropy"}, "test set: "),
    "by name": (["auc"], NAMED, "test set: "),
    "capitals": (["AUC"], CLASSIFIED, "unknown metric 'AUC'; did you mean 'auc'?"),
    "of every loss": (["accuracy"], CLASSIFIED, "always there with it, as test_accuracy"),
    "unknown": (["aux"], CLASSIFIED, "metrics: unknown metric 'aux'; did you mean 'auc'?"),
    "no list": ("auc", CLASSIFIED, "expected a list, such as .*, seen 'auc'"),
    "no name": ([3], CLASSIFIED, "metrics: unknown metric '3'"),
    "real numbers": (["auc"], REGRESSION, "'auc' is of classes or labels, but .* are real numbers"),
    "f1 of three": (["f1"], CLASSIFIED, "'f1' is of class 1 of two .* 3 classes; take f1_macro"),
    "top 3 of 3": (["top-3"], CLASSIFIED, "'top_3' of 3 classes: expected k >= 2, and more"),
    "top 1": (["top_1"], CLASSIFIED, "top_1 is the accuracy"),
    "top of labels": (["top_2"], LABELLED, "'top_2' is of one class of several"),
    "confusion of labels": (["confusion"], LABELLED, "the model has 3 labels"),
    "of the loss": ([ht.metrics.Metric("accuracy", lambda o, t: {"n": 1}, len)], CLASSIFIED,
                    "'accuracy' is a metric of the loss cross_entropy already"),
    "two of a name": ([ht.metrics.Metric("a", lambda o, t: {"n": 1}, len),
                       ht.metrics.Metric("a", lambda o, t: {"n": 1}, len)], CLASSIFIED,
                      "expected one metric of the name 'a'"),
    "its sums fail": ([ht.metrics.Metric("a", lambda o, t: {"n": o.nothing}, len)], CLASSIFIED,
                      "metric 'a': AttributeError: .*nothing"),
    "its finish fails": ([ht.metrics.Metric("a", lambda o, t: {"n": 1}, lambda s: s["m"])],
                         CLASSIFIED, "metric 'a': KeyError: 'm'"),
    "no sums": ([ht.metrics.Metric("a", lambda o, t: {}, len)], CLASSIFIED, "seen none"),
    "its value": ([ht.metrics.Metric("a", lambda o, t: {"n": 1}, str)], CLASSIFIED,
                  "expected a number or None from `finish`, seen a str"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_metrics_that_do_not_fit_are_refused_before_training(kind):
    names, keys, message = REFUSED[kind]
    outputs = 1 if keys is REGRESSION else 3

    def body(world):
        y = keys["y"]
        x = np.ones((len(y), 1), np.float32)
        built = nn.Model([nn.Linear(outputs)], 1, keys["loss"])
        with Trainer(built, "sgd", world=world, metrics=names) as trainer:
            trainer.fit((x, y), steps=1, evaluate=(x, y))

    with pytest.raises(UsageError, match=message):
        run_on("threads", 2, body)


def own_metric(size):
    return ht.metrics.Metric("own", lambda o, t: {"n": np.ones(size)}, lambda sums: 1.0)


DIFFERENT = {
    "none": (["confusion"], [], r"rank 0 has \['confusion'\] .* rank 1 has \[\] with 2 counts"),
    "order": (["auc", "f1_macro"], ["f1_macro", "auc"], r"rank 1 has \['f1_macro', 'auc'\]"),
    "sums": ([own_metric(1)], [own_metric(2)], r"and 1 sums, but rank 1 .* and 2 sums"),
}  # fmt: skip


@pytest.mark.parametrize("fits", [False, True])
@pytest.mark.parametrize("kind", DIFFERENT)
def test_other_metrics_on_other_ranks_are_refused(kind, fits):
    first, second, message = DIFFERENT[kind]

    def body(world):
        names = second if world.rank else first
        with Trainer(model("classes"), "sgd", world=world, metrics=names) as trainer:
            if fits:
                return trainer.fit(samples("classes"), steps=1, evaluate=samples("classes"))
            return trainer.evaluate(samples("classes"))

    with pytest.raises(UsageError, match="metrics must be the same on all ranks; .*" + message):
        run_on("threads", 2, body)


def test_a_confusion_of_many_classes_is_refused():
    with pytest.raises(UsageError, match="at most 256 classes, but the model has 257 classes"):
        counts.bind_confusion(Task(257, 1), "confusion")


@on_ranks(1, 2, 3)
def test_a_metric_of_the_users_own(ranks):
    """Sums with names, numbers and arrays, over uneven shares."""

    def sums(outputs, targets):
        errors = abs(outputs[:, 0] - targets)
        return {"error": errors.sum(), "n": len(errors), "largest": [errors.max(initial=0), 1.0]}

    def finish(sums):
        assert sums["largest"].shape == (2,) and np.ndim(sums["n"]) == 0
        return sums["error"] / sums["n"]

    metric = ht.metrics.Metric("mean_error", sums, finish)
    never = ht.metrics.Metric("never", lambda o, t: {"n": 0}, lambda sums: 1 / int(sums["n"]))
    log = ht.metrics.Metric("log", lambda o, t: {"n": 0}, lambda sums: math.log(sums["n"]))
    x = np.linspace(-1, 1, 29)[:, None]

    def body(world):
        built = nn.Model([nn.Linear(1)], 1, "mean_squared_error")
        with Trainer(built, "sgd", world=world, metrics=[metric, never, log]) as trainer:
            trainer.fit((x, x[:, 0]), steps=3, evaluate=(x, x[:, 0]))
            errors = abs(trainer.predict(x) - x)
            return trainer.summary, float(errors.mean())

    for summary, expected in ranks(body):
        assert summary["test_mean_error"] == pytest.approx(expected, rel=1e-5)
        assert summary["test_never"] is None and summary["test_log"] is None


def test_without_a_test_set_metrics_are_said_to_be_unused(caplog):
    caplog.set_level(logging.WARNING, "hpctrain")
    run_on("threads", 2, lambda world: Trainer(
        model("classes"), "sgd", world=world, metrics=["auc"]
    ).fit(samples("classes"), steps=1))  # fmt: skip
    assert [r.getMessage() for r in caplog.records].count(
        "metrics are of a test set, and there is none: give evaluate=(x, y)"
    ) == 1


def test_scores_are_gathered_a_few_columns_at_a_time(monkeypatch, caplog):
    """One column at least; the memory of scores is said before training."""
    from hpctrain.training import evaluation

    monkeypatch.setattr(evaluation, "GATHERED_BYTES", 8 * SAMPLES * 2)
    monkeypatch.setattr(evaluation, "ANNOUNCED_BYTES", 0)
    assert [*evaluation._column_ranges(SAMPLES, 5)] == [(0, 2), (2, 4), (4, 5)]
    assert [*evaluation._column_ranges(1 << 40, 2)] == [(0, 1), (1, 2)]
    caplog.set_level(logging.INFO, "hpctrain")

    def body(world):
        result = evaluated(world, "classes")
        with Trainer(model("classes"), "sgd", world=world, metrics=["auc"]) as trainer:
            trainer.fit(samples("classes"), steps=1, evaluate=samples("classes"))
        return result

    check("classes", run_on("threads", 3, body))
    assert "auc: the scores of an evaluation need 0 MiB per rank" in caplog.text


def test_labels_are_gathered_a_few_columns_at_a_time(monkeypatch):
    from hpctrain.engines.base import EngineBase
    from hpctrain.training import evaluation

    lengths, add = [], EngineBase.sum
    monkeypatch.setattr(evaluation, "GATHERED_BYTES", 8 * SAMPLES)
    monkeypatch.setattr(EngineBase, "sum", lambda self, x: lengths.append(x.size) or add(self, x))
    check("labels", run_on("threads", 3, lambda world: evaluated(world, "labels")))
    assert max(lengths) == SAMPLES and lengths.count(SAMPLES) == 3 * 3 * 2  # scores and labels


def test_odds_are_not_rounded_to_a_tie():
    """Probabilities that float64 rounds to 1 keep their order."""
    z = np.array([[60.0, 0.0, 1.0], [70.0, 0.0, 1.0], [0.0, 60.0, 1.0], [1e4, -1e4, 0.0]])
    odds = auc.columns_of(Scores(z, np.zeros(4, int), np.zeros(2)))
    assert (np.diff(odds[[2, 0, 1, 3], 0]) > 0).all() and np.isfinite(odds).all()
    p = np.exp(z[:3]) / np.exp(z[:3]).sum(axis=1, keepdims=True)
    small = p < 0.9
    np.testing.assert_allclose(odds[:3][small], np.log(p / (1 - p + 1e-300))[small], rtol=1e-12)


def test_rows_of_metrics_can_be_read(tmp_path):
    """Through the files of a run, a matrix too."""
    run_on("threads", 2, lambda world: Trainer(
        model("classes"), "sgd", world=world, metrics=["confusion", "auc"]
    ).fit(samples("classes"), epochs=2, evaluate=samples("classes"), out=tmp_path))  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(rows) == 2 and re.fullmatch(r"0\.\d+", str(rows[0]["test_auc"]))
    assert summary["test_confusion"] == rows[1]["test_confusion"]
    assert np.sum(summary["test_confusion"]) == SAMPLES
