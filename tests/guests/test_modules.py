"""Modules of PyTorch under every engine: results do not depend on the number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from guests import modules

HERE = Path(__file__).parent
LIMIT = 1e-12


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_each_row_equals_a_single_rank(start, states, ranks):
    for count in (1, ranks):
        if not (states / f"{count}.npz").exists():
            job = start(HERE / "modules.py", states / f"{count}.npz", ranks=count)
            completed = job.finish(280)
            assert completed.returncode == 0, completed.stderr
    single, several = (np.load(states / f"{count}.npz") for count in (1, ranks))
    differences = {name: abs(single[name] - several[name]).max() for name in modules.TABLE}
    assert {name: d for name, d in differences.items() if not d <= LIMIT} == {}
    ordered = [name for name in modules.TABLE if "ordered" in name]
    assert all(np.array_equal(single[name], several[name]) for name in ordered)
    for name, other in {"gpt allreduce": "gpt recomputed", "random": "random recomputed"}.items():
        assert np.array_equal(single[name], single[other])
    assert abs(single["random"] - single["random micro-batches"]).max() <= LIMIT
    assert len({array.tobytes() for array in single.values()}) > len(modules.TABLE) // 2


def read_summary(run):
    return json.loads((run / "summary.json").read_text())


ORDERED = ("--set", "wire.reduction=ordered", "--set", "model.normalizes=false")


@pytest.mark.either
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "settings, ranks, resumed_ranks",
    [
        ((), 2, 2),
        (ORDERED, 2, 3),
        pytest.param(("--set", "engine.shard_optimizer=true"), 2, 2, marks=pytest.mark.full),
    ],
    ids=["the same ranks", "ordered, other ranks", "sharded"],
)
def test_a_resumed_recipe_ends_with_the_bytes_of_one_run(
    hpctrain, tmp_path, settings, ranks, resumed_ranks
):
    """With dropout, AdamW, a cosine, and buffers of integers."""

    def train(out, count, *words):
        job = ("launch", "-n", count, "train", "cnn-torch")
        completed = hpctrain(*job, *settings, *words, "--out", out)
        assert completed.returncode == 0, completed.stderr
        return read_summary(out)["params_sha256"]

    steps = ("--set", "run.steps=30", "--set", "checkpoint.every_epochs=", "--set",
             "checkpoint.every_steps=10", "--set", "run.interval_steps=10")  # fmt: skip
    complete = train(tmp_path / "complete", ranks, *steps)
    stop = tmp_path / "stopped"
    train(stop, ranks, *steps)
    for later in (stop / "checkpoints").glob("*30*"):
        later.rename(tmp_path / later.name)
    assert train(stop, resumed_ranks, *steps, "--resume") == complete


@pytest.mark.either
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "engine",
    ["ps-async", *(pytest.param(kind, marks=pytest.mark.full)
                   for kind in ("ps-sync", "local-sgd", "easgd", "gossip"))],
)  # fmt: skip
def test_engines_that_average_learn_as_a_single_rank_does(hpctrain, tmp_path, engine):
    """A single rank reaches 0.97 to 0.99 in these 12 epochs."""
    words = ("--engine", engine, "--epochs", 12, "--set", "optimizer.batch=48")
    out = tmp_path / "run"
    completed = hpctrain("launch", "-n", 3, "train", "cnn-torch", *words, "--out", out)
    assert completed.returncode == 0, completed.stderr
    assert read_summary(out)["test_accuracy"] >= 0.96


@pytest.mark.either
@pytest.mark.timeout(100)
def test_the_benchmark_of_steps_measures_modules_beside_ddp(hpctrain, tmp_path):
    """All contenders end with equal losses."""
    words = ("--model", "torch", "--batch-per-rank", 16, "--iterations", 1, "--warm-up", 0)
    file = tmp_path / "rows.json"
    completed = hpctrain("launch", "-n", 2, "bench", "step", "digits", *words, "--json", file)
    assert completed.returncode == 0, completed.stderr
    rows = json.loads(file.read_text())["rows"]
    names = ["auto", "share-parameters", "null", "torch-null", "gloo", "ddp", "sync"]
    assert [row["algorithm"] for row in rows] == names
    assert all(row["correct"] for row in rows)


@pytest.mark.either
@pytest.mark.timeout(200)
def test_a_replay_repeats_an_asynchronous_run(hpctrain, tmp_path):
    job = ("launch", "-n", 3, "train", "cnn-torch", "--engine", "ps-async", "--epochs", 2)
    for words in (("--out", tmp_path / "a"), ("--out", tmp_path / "b", "--replay", tmp_path / "a")):
        completed = hpctrain(*job, *words)
        assert completed.returncode == 0, completed.stderr
    first, second = (read_summary(tmp_path / run)["params_sha256"] for run in "ab")
    assert first == second
