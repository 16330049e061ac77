"""Weights of classes in the cross-entropy, against its formula in float64, on ranks and engines."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from click.testing import CliRunner
from ranks import on_ranks, run_on

import hpctrain as ht
from hpctrain import data, engines, nn
from hpctrain.commands.checkpoint import evaluate
from hpctrain.core.errors import UsageError
from hpctrain.data import Dataset, count_labels
from hpctrain.nn.losses import wait_for_sums
from hpctrain.training import recipe, runs

WEIGHTS = (0.5, 3.0, 0.0, 1.25)
N, BATCH, STEPS, RATE = 50, 16, 9, 0.3  # the last batch has 2 samples: fewer than some ranks
ENGINES = {
    "allreduce": lambda: engines.AllReduce(),
    "shards": lambda: engines.AllReduce(shard_optimizer=True),
    "overlap": lambda: engines.AllReduce(overlap="always", bucket_bytes=64),
    "ordered": lambda: engines.AllReduce(reduction="ordered", blocks=5),
    "ps-sync": lambda: engines.PsSync(),
}


@cache
def samples() -> data.Dataset:
    draw = np.random.default_rng(5)
    return data.Dataset(draw.standard_normal((N, 3)), draw.integers(0, 4, N) * (np.arange(N) % 3))


@cache
def labels() -> np.ndarray:
    return np.minimum(samples().y, 3)


def formula(z, y, weights) -> tuple[float, np.ndarray]:
    """Return the mean loss of PyTorch's `weight=`, and its gradient, written plainly."""
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    w = np.array(weights)[y]
    total = w.sum()
    loss = -(w * np.log(p[np.arange(len(y)), y])).sum() / total if total else 0.0
    return loss, (w[:, None] * (p - np.eye(len(weights))[y])) / (total or 1.0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("memory", ["host", "device"])
def test_sums_and_gradient_are_those_of_the_formula(memory, dtype, request):
    if memory == "device":
        request.getfixturevalue("gpu")
    draw = np.random.default_rng(0)
    z, y = draw.standard_normal((2, 7, 4)).astype(dtype), draw.integers(0, 4, (2, 7))
    loss = nn.CrossEntropy(list(WEIGHTS))
    flat, plain = z.reshape(-1, 4).astype("f8"), y.ravel()
    total = np.array(WEIGHTS)[plain].sum()
    expected, slope = formula(flat, plain, WEIGHTS)
    if memory == "device":
        import cupy

        z, y = cupy.asarray(z), cupy.asarray(y)
    pending, dz = loss(z, y, 2.0)
    sums = wait_for_sums(pending)
    dz = dz if memory == "host" else dz.get()
    tight = 1e-6 if dtype == "float32" else 1e-14
    assert sums["loss"].mean == pytest.approx(expected, rel=tight)
    assert sums["loss"].count == pytest.approx(total) and sums["accuracy"].count == 14
    assert dz.dtype == dtype
    np.testing.assert_allclose(dz.reshape(-1, 4), 2 * total * slope, atol=10 * tight)
    pending, dz = loss(z, y)
    assert wait_for_sums(pending) == sums and dz is None


def trained_plainly(weights) -> tuple[np.ndarray, float]:
    """Return the parameters of one layer after the steps of the Trainer, and the last loss."""
    built = nn.Model([nn.Linear(4)], 3)
    start = nn.initial_values(built.parameters, 0)
    names = list(start)
    values = {name: np.array(x, np.float64) for name, x in start.items()}
    w, b = sorted(names, key=lambda name: -values[name].ndim)
    sampler = data.Sampler(N, BATCH, 0)
    for step in range(STEPS):
        rows = sampler.batch_indexes(step)
        x, y = samples().x[rows], labels()[rows]
        _, slope = formula(x @ values[w] + values[b], y, weights)
        values[w] -= RATE * x.T @ slope
        values[b] -= RATE * slope.sum(axis=0)
    loss, _ = formula(samples().x @ values[w] + values[b], labels(), weights)
    return np.concatenate([values[name].ravel() for name in names]), loss


def fit(world, engine, weights=WEIGHTS, model=None, **keys):
    built = model or nn.Model([nn.Linear(4)], 3, nn.CrossEntropy(weights))
    trained = data.Dataset(samples().x, labels())
    with ht.Trainer(
        built, ht.optim.sgd(RATE), engine, precision="float64", world=world, **keys.pop("own", {})
    ) as trainer:
        summary = trainer.fit(trained, steps=STEPS, batch=BATCH, evaluate=trained, **keys)
        arena = trainer.replica.arena
        views = arena.views(arena.param) if trainer.engine.worker is not None else {}
        return np.concatenate([x.ravel() for x in views.values()]) if views else None, summary


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2, 3, 5, mpi=(2, 4, 5))
def test_a_step_is_divided_by_the_weights_of_its_targets(ranks, engine):
    """Whatever the shares: some have no sample, or none of a weight above 0."""
    expected, loss = trained_plainly(WEIGHTS)
    for param, summary in ranks(lambda world: fit(world, ENGINES[engine]())):
        if param is not None:
            np.testing.assert_allclose(param, expected, rtol=0, atol=1e-12)
        assert summary["test_loss"] == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("engine", ["single", "local-sgd", "ps-async", "easgd", "gossip"])
def test_workers_that_step_apart_divide_by_the_weights_of_their_own(engine):
    """So equal weights change nothing, however large; one worker has the weights of the step."""
    size = 1 if engine == "single" else 2
    keys = {"single": engines.Single(), "gossip": engines.Gossip(graph="ring")}
    ends = []
    for weights in (None, (7.0, 7.0, 7.0, 7.0)):
        built = nn.Model([nn.Linear(4)], 3, nn.CrossEntropy(weights))
        body = lambda world, built=built: fit(world, keys.get(engine, engine), model=built)  # noqa: E731
        ends.append(run_on("threads", size, body)[0][0])
    np.testing.assert_allclose(*ends, rtol=0, atol=1e-9)
    if engine == "single":
        param, _ = run_on("threads", 1, lambda world: fit(world, engines.Single()))[0]
        np.testing.assert_allclose(param, trained_plainly(WEIGHTS)[0], rtol=0, atol=1e-12)


def test_other_weights_train_other_parameters():
    """So a weight that is dropped would be seen."""
    assert not np.allclose(trained_plainly(WEIGHTS)[0], trained_plainly((1, 1, 1, 1))[0], atol=1e-3)


def test_micro_batches_and_pipelines_divide_by_the_weights_of_a_step():
    expected, _ = trained_plainly(WEIGHTS)
    param, _ = run_on("threads", 3, lambda world: fit(world, "allreduce", micro_batches=2))[0]
    np.testing.assert_allclose(param, expected, rtol=0, atol=1e-12)

    def deep(world, **keys):
        layers = [nn.Linear(5), nn.ReLU(), nn.Linear(4)]
        return fit(world, "allreduce", model=nn.Model(layers, 3, nn.CrossEntropy(WEIGHTS)), **keys)

    _, alone = run_on("threads", 1, deep)[0]
    mesh = {"own": {"mesh": ht.parallel.MeshOptions(pipe=2)}, "micro_batches": 4}
    for _, summary in run_on("threads", 4, lambda world: deep(world, **mesh)):
        for key in ("test_loss", "train_loss"):
            assert summary[key] == pytest.approx(alone[key], rel=1e-12)


def test_ordered_sums_of_weights_have_the_same_bytes_on_any_ranks():
    hashes = {
        run_on("threads", p, lambda world: fit(world, ENGINES["ordered"]()))[0][1]["params_sha256"]
        for p in (1, 2, 3, 5)
    }
    assert len(hashes) == 1


def spec(tmp_path, weights, **keys) -> recipe.Recipe:
    draw = np.random.default_rng(1)
    y = np.repeat([0, 1, 2], [30, 9, 6])
    x = draw.normal(size=(45, 2)) + y[:, None]
    np.savez(tmp_path / "d.npz", x=x, y=y, x_test=x, y_test=y)
    return recipe.check({
        "schema": 1, "run": {"name": "weighted", "steps": 6},
        "model": {"kind": "mlp", "widths": [2, 3]},
        "data": {"kind": "npz", "path": str(tmp_path / "d.npz")},
        "loss": {"kind": "cross_entropy", "class_weights": weights, **keys},
        "optimizer": {"kind": "sgd", "rate": 0.1, "batch": 16},
    })  # fmt: skip


def test_balanced_weights_are_counted_by_all_ranks_and_kept(tmp_path, caplog):
    """n / (classes count): the run equals that with the same numbers, also when evaluated."""
    caplog.set_level("INFO", "hpctrain")
    (tmp_path / "data").mkdir()
    weights = [45 / (3 * 30), 45 / (3 * 9), 45 / (3 * 6)]
    ends = {}
    for kind, given in {"balanced": "balanced", "numbers": weights, "ones": [1, 1, 1]}.items():
        built = spec(tmp_path / "data", given)
        for size in (1, 3):
            out = tmp_path / f"{kind}-{size}"
            train = lambda world, built=built, out=out: runs.train(built, world, out, False)  # noqa: E731
            summary = run_on("threads", size, train)[0]
            ends[kind, size] = summary["params_sha256"], summary["test_loss"]
            result = CliRunner().invoke(evaluate, [str(out)], catch_exceptions=False)
            evaluated = json.loads(result.stdout)
            assert evaluated["test_loss"] == pytest.approx(summary["test_loss"], rel=1e-6)
    for size in (1, 3):
        assert ends["balanced", size] == ends["numbers", size] != ends["ones", size]
    assert "[loss] class_weights: 0.5, 1.667, 2.5" in caplog.text
    assert nn.balanced_class_weights([30, 9, 6]) == tuple(weights)


REFUSED = {
    "of another loss": (lambda folder: spec(folder, [1.0], kind="mean_squared_error"),
                        r"\[loss\] class_weights: expected kind = 'cross_entropy', seen 'mean_sq"),
    "a word": (lambda folder: spec(folder, "balance"), r"\[loss\] class_weights 'balance'; did you "
               "mean 'balanced'"),
    "lists": (lambda folder: spec(folder, [[1], [1, 2]]), r"class_weights: expected a number of 0"),
    "negative": (lambda folder: spec(folder, [1.0, -1.0, 1.0]), "a number of 0 or more for each"),
    "all 0": (lambda folder: nn.CrossEntropy([0, 0]), "not all 0"),
    "text": (lambda folder: nn.CrossEntropy("balanced"), r"write balanced_class_weights\(counts\)"),
    "real labels": (lambda folder: count_labels(Dataset(np.ones((3, 1)), np.ones(3)), 2),
                    "expected integers in 0 .. 1, seen float64"),
    "a tree of labels": (lambda folder: count_labels(Dataset(np.ones((3, 1)), (np.ones(3),)), 2),
                         "expected one array, seen a tuple"),
    "a label too large": (lambda folder: count_labels(Dataset(np.ones((3, 1)), np.arange(3)), 2),
                          "seen int64 from 0 to 2"),
    "a missing class": (lambda folder: nn.balanced_class_weights([3, 0, 1]),
                        "class 1 has no training sample"),
    "too few": (lambda folder: run_on("threads", 2, lambda world: runs.train(
        spec(folder, [1.0, 2.0]), world, None, False)), "expected 3 class_weights, .* seen 2"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_weights_that_do_not_fit_are_refused(kind, tmp_path):
    make, message = REFUSED[kind]
    with pytest.raises(UsageError, match=message):
        make(tmp_path)
