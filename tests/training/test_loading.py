"""Data of recipes: one scale for files of every kind, on any number of ranks, kept with the run."""

from __future__ import annotations

import gzip
import json
import struct

import numpy as np
import pytest
from click.testing import CliRunner
from ranks import run_on

from hpctrain import nn
from hpctrain.commands.checkpoint import evaluate
from hpctrain.core.errors import BadSampleError, UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.data import Dataset, ReadOptions, ReadSamples, read
from hpctrain.data.scaling import BLOCKS, Scale, block_moments, scale_from
from hpctrain.training import loading, recipe, runs
from hpctrain.training.fit import RunOrigin
from hpctrain.training.trainer import Trainer

RNG = np.random.default_rng(0)
N = 150
Y = (np.arange(N) % 3).astype(np.uint8)
IMAGES = (RNG.integers(0, 200, (N, 5, 4)) + 20 * Y[:, None, None]).astype(np.uint8)
COLUMNS = (RNG.normal(size=(N, 4)) + 3 * Y[:, None]) * [1, 1e3, 1, 0] + [0, 0, 0, 7]
COLUMNS = COLUMNS.astype(np.float32)


def idx(x: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{x.ndim}I", 0, 0, 8, x.ndim, *x.shape) + x.tobytes()


def write(folder, kind: str, x: np.ndarray, y: np.ndarray = Y) -> dict[str, object]:
    """Write a training set that is the test set, too; return the table [data]."""
    if kind == "npz":
        np.savez(folder / "d.npz", x=x, y=y.astype(np.int64), x_test=x, y_test=y.astype(np.int64))
        return {"kind": "npz", "path": str(folder / "d.npz")}
    if kind == "npy":
        np.save(folder / "x.npy", x)
        np.save(folder / "y.npy", y)
        paths = {"x": str(folder / "x.npy"), "y": str(folder / "y.npy")}
        classes = {"classes": 3} if y.dtype.kind != "f" else {}
        return {"kind": "npy", **paths, "x_test": paths["x"], "y_test": paths["y"], **classes}
    (folder / "x.gz").write_bytes(gzip.compress(idx(x)))
    (folder / "y").write_bytes(idx(y))
    paths = {"images": str(folder / "x.gz"), "labels": str(folder / "y")}
    return {"kind": "idx", **paths, **{f"test_{key}": path for key, path in paths.items()}}


def spec(
    data: dict, rate: float = 0.1, steps: int = 12, faults=None, **run: object
) -> recipe.Recipe:
    train_set = read({**data, "scale": "none"}).load(0, finite=False).train
    widths = [int(np.prod(train_set.sample_shape)), 8, 1 if train_set.y.dtype.kind == "f" else 3]
    return recipe.check({
        "schema": 1, "run": {"name": "scaled", "steps": steps, "interval_steps": 4, **run},
        "model": {"kind": "mlp", "widths": widths}, "data": data,
        **({"loss": {"kind": "mean_squared_error"}} if widths[-1] == 1 else {}),
        "optimizer": {"kind": "sgd", "rate": rate, "batch": 32},
        "checkpoint": {"every_steps": 4}, "faults": faults or {},
    })  # fmt: skip


def train(data: dict, out=None, size: int = 1, resume: bool = False, **keys) -> dict:
    made = spec(data, **keys)
    return run_on("threads", size, lambda world: runs.train(made, world, out, resume))[0]


def evaluated(run) -> dict:
    result = CliRunner().invoke(evaluate, [str(run)], catch_exceptions=False)
    return json.loads(result.stdout)


@pytest.mark.parametrize("kind", ["npz", "npy", "idx"])
def test_images_of_bytes_are_divided_by_255_whatever_their_file(tmp_path, kind, caplog):
    caplog.set_level("INFO", "hpctrain")
    run = tmp_path / "run"
    summary = train(write(tmp_path, kind, IMAGES), run)
    expected = train(write(tmp_path, "npz", IMAGES.astype(np.float32) / 255), tmp_path / "expected")
    assert summary["params_sha256"] == expected["params_sha256"]
    assert "[data] scale: uint8 samples are divided by 255 (auto)" in caplog.text
    assert evaluated(run)["test_loss"] == summary["test_loss"]
    model = runs.load(run)
    outputs = model.predict(IMAGES)
    assert np.array_equal(outputs, model.predict(IMAGES.astype(np.float32) / 255))
    assert model.evaluate((IMAGES, Y))["accuracy"] == (outputs.argmax(1) == Y).mean()


@pytest.mark.parametrize("rule", ["standard", "minmax"])
@pytest.mark.parametrize("x", [COLUMNS, IMAGES, IMAGES[..., None]], ids=["table", "hw", "hwc"])
def test_measured_scales_are_the_same_on_any_number_of_ranks(tmp_path, rule, x, caplog):
    caplog.set_level("INFO", "hpctrain")
    table = {**write(tmp_path, "npy", x), "scale": rule}
    losses = {size: train(table, tmp_path / f"{size}", size) for size in (1, 3)}
    saved = [runs.load(tmp_path / f"{size}").scale for size in losses]
    axis = tuple(range(x.ndim if x.ndim == 3 else x.ndim - 1))
    double = x.astype(np.float64)
    shift, width = {
        "standard": (double.mean(axis), double.std(axis)),
        "minmax": (double.min(axis), double.max(axis) - double.min(axis)),
    }[rule]
    for scale in saved:
        assert scale.shift.tobytes() == saved[0].shift.tobytes()
        assert scale.divisor.tobytes() == saved[0].divisor.tobytes()
        np.testing.assert_allclose(scale.shift, np.atleast_1d(shift), rtol=1e-12, atol=1e-12)
        width = np.atleast_1d(np.where(width > 1e-9, width, 1.0))
        np.testing.assert_allclose(scale.divisor, width, rtol=1e-9)
    assert f"over {N} training samples ({rule})" in caplog.text
    for size, summary in losses.items():
        assert evaluated(tmp_path / f"{size}")["test_loss"] == pytest.approx(summary["test_loss"])


@pytest.mark.parametrize("ranks", [1, 2, 7, BLOCKS + 1])
def test_blocks_of_ranks_give_the_bits_of_one_rank(ranks):
    whole = scale_from(block_moments(dataset(COLUMNS), range(BLOCKS)), "standard")
    parts = [block_moments(dataset(COLUMNS), range(r, BLOCKS, ranks)) for r in range(ranks)]
    scale = scale_from(np.sum(parts, axis=0), "standard")
    assert scale.shift.tobytes() == whole.shift.tobytes()
    assert scale.divisor.tobytes() == whole.divisor.tobytes() and whole.divisor[3] == 1


def dataset(x, finite=True):
    return Dataset(x, Y, finite)


def test_rows_that_are_not_finite_do_not_count():
    x = COLUMNS.copy()
    x[5, 1] = np.nan
    scale = scale_from(block_moments(dataset(x, finite=False), range(BLOCKS)), "minmax")
    assert np.array_equal(scale.shift, np.delete(x, 5, axis=0).min(axis=0))


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ({"scale": "standard"}, {"scale": "standard"}, ""),
        ({"scale": "standard"}, {}, ""),
        ({"scale": "standard"}, {"scale": "minmax"}, "expected 'standard', with which this run be"),
        ({}, {"scale": "none"}, "expected 'auto', with which this run began, seen 'none'"),
    ],
)
def test_a_resumed_run_keeps_its_scale(tmp_path, first, then, message):
    table, run = write(tmp_path, "npy", IMAGES), tmp_path / "run"
    whole = train({**table, **first}, tmp_path / "whole")
    train({**table, **first}, run, steps=8)
    if message:
        with pytest.raises(UsageError, match=message):
            train({**table, **then}, run, resume=True)
    else:
        summary = train({**table, **then}, run, 2, resume=True)
        assert summary["test_loss"] == pytest.approx(whole["test_loss"], rel=1e-4)
        assert runs.load(run).scale.rule == "standard"


@pytest.mark.parametrize(("kind", "rule"), [("npy", "none"), ("npz", "none"), ("idx", "auto")])
def test_an_older_checkpoint_goes_on_with_its_own_rule(tmp_path, monkeypatch, kind, rule):
    """Before the key existed, uint8 samples of idx files alone were divided."""
    table, run = write(tmp_path, kind, IMAGES), tmp_path / "run"
    keys = {"rate": 1e-4}
    whole = train({**table, "scale": rule}, tmp_path / "whole", **keys)
    with monkeypatch.context() as older:
        older.setattr(runs, "RunOrigin", lambda *facts: RunOrigin(*facts[:2]))
        train({**table, "scale": rule}, run, steps=8, **keys)
    assert evaluated(run)["test_loss"] == evaluated(run)["test_loss"]
    assert runs.load(run).scale.rule == rule
    assert train(table, run, resume=True, **keys)["params_sha256"] == whole["params_sha256"]


@pytest.mark.parametrize(
    ("x", "options", "text"),
    [
        (COLUMNS, {"scale": "standard"}, "each of 4 columns minus its mean"),
        (IMAGES, {"shift": 1}, "uint8 samples are divided by 255 (auto)"),
    ],
)
def test_a_run_of_a_trainer_keeps_the_scale_of_its_samples(tmp_path, caplog, x, options, text):
    """The loaded model takes samples as in the file; scaled ones, however read, are not again."""
    caplog.set_level("INFO", "hpctrain")
    split = read({**write(tmp_path, "npz", x), **options}).load(0)
    model = nn.Model([nn.Flatten(), nn.Linear(3)], x.shape[1:])
    train_set = ReadSamples(split.train, ReadOptions())

    def fit(world):
        with Trainer(model, "adamw", world=world) as trainer:
            trainer.fit(train_set, steps=2, batch=30, out=tmp_path / "run")
            return trainer.evaluate(split.test)

    (metrics,) = run_on("threads", 1, fit)
    trained = runs.load(tmp_path / "run", model=model)
    raw, read_again = (x, Y.astype(np.int64)), ReadSamples(split.test, ReadOptions())
    assert metrics == trained.evaluate(raw) == trained.evaluate(read_again)
    assert f"[data] scale: {text}" in caplog.text


DIVIDED = IMAGES.astype(np.float32) / 255
TRAINER_SCALES = {
    "the same": (COLUMNS, {"scale": "standard"}, COLUMNS, {"scale": "standard"}, ""),
    "auto, without effect": (COLUMNS, {"scale": "auto"}, COLUMNS, {"scale": "none"}, ""),
    "another rule": (COLUMNS, {"scale": "standard"}, COLUMNS, {"scale": "minmax"},
                     "scaled by 'standard', with which this run began, seen 'minmax'; give"),
    "other numbers": (COLUMNS, {"scale": "standard"}, 2 * COLUMNS, {"scale": "standard"},
                      "scaled by 'standard', .* seen 'standard' of other numbers"),
    "no longer": (COLUMNS, {"scale": "standard"}, COLUMNS, {},
                  "scaled by 'standard', .* seen 'none'"),
    "only now": (IMAGES, {"scale": "none"}, IMAGES, {}, "scaled by 'none', .* seen 'auto'"),
    "auto, by hand": (IMAGES, {}, DIVIDED, {}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINER_SCALES)
def test_a_trainer_that_is_resumed_with_another_scale_is_refused(tmp_path, name):
    x, options, other_x, other_options, message = TRAINER_SCALES[name]

    def fit(world, x, options, steps, **keys):
        split = read({**write(tmp_path, "npz", x), **options}).load(0)
        layers = [nn.Flatten(), nn.Linear(3)]
        with Trainer(nn.Model(layers, x.shape[1:]), "adamw", world=world) as trainer:
            keys |= {"batch": 30, "out": tmp_path / "run"}
            return trainer.fit(split.train, steps=steps, **keys)

    run_on("threads", 1, lambda world: fit(world, x, options, 2))
    resumed = lambda world: fit(world, other_x, other_options, 4, resume=True)  # noqa: E731
    if message:
        with pytest.raises(UsageError, match=rf"step-00000002: expected samples {message}"):
            run_on("threads", 1, resumed)
    else:
        assert run_on("threads", 1, resumed)[0]["steps"] == 4


BAD_SETS = {
    "samples": ((COLUMNS[:, :3], Y), r"expects samples of shape \(4,\), seen \(3,\)"),
    "labels": ((COLUMNS, Y + 1), "evaluated set: label 3 of sample 2 is out of range"),
    "targets": ((COLUMNS, COLUMNS[:, 0]), "evaluated set: .*integer class labels, seen float32"),
}


@pytest.mark.parametrize("name", BAD_SETS)
def test_a_loaded_model_refuses_sets_that_do_not_fit(tmp_path, name):
    samples, message = BAD_SETS[name]
    train({**write(tmp_path, "npy", COLUMNS), "scale": "standard"}, tmp_path / "run")
    with pytest.raises(UsageError, match=message):
        runs.load(tmp_path / "run").evaluate(samples)


def test_real_targets_are_no_labels(tmp_path):
    tables = spec(write(tmp_path, "npy", COLUMNS, COLUMNS[:, 0])).tables
    labelled = recipe.check(tables | {"loss": {"kind": "cross_entropy"}})
    with pytest.raises(UsageError, match="expected integer class labels, seen float32; convert"):
        runs.count_outputs(labelled, loading.load_raw(labelled))


def test_tokens_of_bytes_are_no_images(tmp_path):
    made = spec(write(tmp_path, "npy", IMAGES[:, 0]))
    model = nn.Model([nn.Embedding(256, 4), nn.Flatten(), nn.Linear(3)], (4,))
    split = loading.load_raw(made)
    chosen = run_on("threads", 1, lambda w: loading.choose_scale(made, split, model, w, None))[0]
    assert chosen.rule == "none"


@pytest.mark.parametrize("shift", [[0.0], [0.0] * 5])
def test_scales_of_other_samples_are_refused(shift):
    with pytest.raises(UsageError, match="expected a scale of 4 numbers for samples"):
        Scale("standard", np.array(shift), np.ones(len(shift))).must_fit((4,), "step-8")


# --- NaN -----------------------------------------------------------------------------------------

X_WITH_NAN = np.where(np.arange(4 * N).reshape(N, 4) == 4 * 17 + 3, np.nan, COLUMNS)


@pytest.mark.parametrize("kind", ["npz", "npy"])
@pytest.mark.parametrize("not_finite", ["stop", "skip"])
def test_nan_is_named_by_row_and_column_or_skipped(tmp_path, kind, not_finite):
    table = {**write(tmp_path, kind, X_WITH_NAN), "scale": "standard"}
    if not_finite == "stop":
        with pytest.raises((UsageError, BadSampleError), match="nan in sample 17, column 3; expec"):
            train(table, tmp_path / "run")
    else:
        summary = train(table, tmp_path / "run", not_finite="skip", steps=10)
        assert summary["status"] == "done" and summary["skipped_steps"] == 2  # one per epoch


# --- Suspicious results --------------------------------------------------------------------------

SUSPICIOUS = {
    "none": (COLUMNS, Y, {"scale": "standard"}, 0.5, []),
    "the loss grows": (COLUMNS, Y, {"scale": "standard"}, 60.0, ["the training loss grew from"]),
    "the most frequent class": (COLUMNS * 0, Y, {}, 0.1, ["0.3333, the share of the most frequen"]),
    "dead outputs": (-abs(COLUMNS) * 9e3, Y, {}, 9.0,
                     ["the share of", "the outputs for 64 different test samples are the same",
                      "scale them, as [data] scale = 'standard' does"]),
    "no better than the mean": (COLUMNS[:, :1] * 0, Y.astype("f4")[:, None], {}, 1e-9,
                                ["r2 of", "not above 0"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SUSPICIOUS)
def test_suspicious_results_are_in_the_summary(tmp_path, name):
    x, y, keys, rate, expected = SUSPICIOUS[name]
    table, faults = {**write(tmp_path, "npy", x, y), **keys}, {"slow_rank": 0, "slow_factor": 1.1}
    summary = train(table, tmp_path / "run", 2, rate=rate, faults=faults)
    texts = run_folder.read_summary(tmp_path / "run")["suspicious"]
    assert texts == summary["suspicious"] and bool(texts) == bool(expected)
    assert all(part in "; ".join(texts) for part in expected)
