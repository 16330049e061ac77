"""Checkpoints between grids: a run that changes its grid ends as the one that never did."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from ranks import run_on

from hpctrain import checkpoint
from hpctrain.core.run_files import run_folder
from hpctrain.training import recipe, runs, weights

STEPS, INTERVAL = 14, 4
#: data x pipe, and the last step on it; no checkpoint but one lies at the end of a row of metrics
GRIDS = {(1, 1): 3, (2, 2): 5, (4, 1): 8, (1, 4): 11, (2, 1): STEPS}
CHANGES = {
    "lamb": ["optimizer.kind=lamb", "optimizer.rate=0.01", "optimizer.clip_norm=1.0"],
    "sharded adamw": ["optimizer.kind=adamw", "optimizer.rate=0.001",
                      "engine.shard_optimizer=true"],
    "vee": ["optimizer.kind=sgd", "optimizer.rate=0.05", "pipeline.schedule=zb-v"],
}  # fmt: skip


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    file = tmp_path_factory.mktemp("samples") / "samples.npz"
    random = np.random.default_rng(5)
    x, y = random.standard_normal((100, 64)), np.arange(100) % 10
    np.savez(file, x=x[:80], y=y[:80], x_test=x[80:], y_test=y[80:])
    return file


def spec(samples, change: str, pipe: int, *others: str) -> recipe.Recipe:
    settings = [
        "run.epochs=", f"run.steps={STEPS}", f"run.interval_steps={INTERVAL}", "data.kind=npz",
        f"data.path={samples}", f"model.widths={[64, *[12] * 7, 10]}", "model.dropout=0.2",
        "wire.reduction=ordered", "optimizer.momentum=", "optimizer.batch=24",
        "optimizer.micro_batches=4", "checkpoint.every_epochs=", "checkpoint.every_steps=1",
        "checkpoint.keep=20", f"mesh.pipe={pipe}", *CHANGES[change], *others,
    ]  # fmt: skip
    one_rank = pipe == 1
    return recipe.load("digits", [s for s in settings if not (one_rank and "pipeline" in s)])


def train(samples, change: str, grid: tuple[int, int], out, *others: str, resume: bool = False):
    data, pipe = grid
    made = spec(samples, change, pipe, *others)
    return run_on("threads", data * pipe, lambda world: runs.train(made, world, out, resume))


def rows_of(out) -> list[list]:
    keys = ("step", "steps", "samples", "train_loss", "test_loss", "test_accuracy", "rate")
    return [[row.get(key) for key in keys] for row in run_folder.rows(out)]


def without_later(out, step: int) -> None:
    """Remove the checkpoints after `step`, as if the job had been lost then."""
    for folder in sorted((out / "checkpoints").glob("step-*"))[step:]:
        shutil.rmtree(folder)


@pytest.mark.full
@pytest.mark.parametrize("change", CHANGES)
def test_a_run_over_five_grids_ends_as_one_on_one_rank(tmp_path, caplog, samples, change):
    (whole,) = train(samples, change, (1, 1), tmp_path / "whole")
    cut, metrics = tmp_path / "cut", rows_of(tmp_path / "whole")
    assert [row[0] for row in metrics] == [4, 8, 12, 14]
    for i, (grid, last) in enumerate(GRIDS.items()):
        summaries = train(samples, change, grid, cut, resume=i > 0)
        assert {summary["params_sha256"] for summary in summaries} == {whole["params_sha256"]}
        assert rows_of(cut) == metrics
        without_later(cut, last)
    assert "may lose rows" not in caplog.text  # though a checkpoint comes before the first row
    loaded = [
        run_on("threads", 1, lambda w, run=folder: checkpoint.load(run, w.link))[0].arrays
        for folder in (tmp_path / "whole", cut)
    ]
    assert loaded[0].keys() == loaded[1].keys()
    assert all(np.array_equal(array, loaded[1][name]) for name, array in loaded[0].items())


@pytest.mark.sample(1)
@pytest.mark.parametrize("grid", [(2, 2), (1, 4)])
def test_a_run_on_a_grid_is_read_as_any_other(tmp_path, samples, grid):
    folders = tmp_path / "whole", tmp_path / "grid"
    (whole,), summaries = (
        train(samples, "lamb", g, f) for g, f in zip(((1, 1), grid), folders, strict=True)
    )
    mesh = summaries[0]["mesh"]
    assert (mesh["data"], mesh["pipe"]) == grid
    metrics = [runs.evaluate(folder) for folder in folders]
    assert metrics[0] == metrics[1]
    assert metrics[1]["test_loss"] == pytest.approx(summaries[0]["test_loss"])
    x = np.load(samples)["x_test"]
    outputs = [runs.load(folder).predict(x) for folder in folders]
    assert outputs[0].tobytes() == outputs[1].tobytes()
    tensors = [weights.read(folder) for folder in folders]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(np.array_equal(x, tensors[1][name]) for name, x in tensors[0].items())
    assert summaries[0]["params_sha256"] == whole["params_sha256"]


@pytest.mark.full
@pytest.mark.parametrize("grid", [(2, 2), (1, 4)])
def test_a_grid_begins_with_the_weights_of_another_run(tmp_path, samples, grid):
    (first,) = train(samples, "lamb", (1, 1), tmp_path / "first")
    init = f"model.init={tmp_path / 'first'}"
    (whole,) = train(samples, "vee", (1, 1), tmp_path / "whole", init)
    summaries = train(samples, "vee", grid, tmp_path / "grid", init)
    assert {summary["params_sha256"] for summary in summaries} == {whole["params_sha256"]}
    assert whole["params_sha256"] != first["params_sha256"]


@pytest.mark.processes
@pytest.mark.either
def test_commands_read_a_run_on_a_grid(tmp_path, samples, hpctrain):
    out, file = tmp_path / "run", tmp_path / "weights.safetensors"
    train(samples, "vee", (2, 2), out)
    for words in (
        ("evaluate", out), ("checkpoint", "verify", out),
        ("checkpoint", "export", out, "--output", file),
    ):  # fmt: skip
        ended = hpctrain(*words)
        assert ended.returncode == 0, ended.stderr
    exported, own = weights.read(file), weights.read(out)
    assert exported.keys() == own.keys()
    assert all(np.array_equal(x, own[name]) for name, x in exported.items())
