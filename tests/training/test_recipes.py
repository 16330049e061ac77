"""The built-in recipes: they fit their data, and P ranks train like one."""

from __future__ import annotations

import json
from math import log

import pytest
from jobs import sets
from ranks import run_on

from hpctrain.training import recipe, runs

# What makes a few steps of a recipe quick: a smaller model, fewer texts to be tested on.
SMALLER = {
    "digits": [],
    "mnist": ["model.blocks=1", "model.channels=[4,8]"],
    "pylm": ["model.layers=1", "model.width=16", "data.test_fraction=0.0005"],
}
STEPS = 3


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SMALLER)
def test_a_built_in_recipe_fits_its_data(name):
    spec = recipe.load(name)
    split = spec.data.load(spec.run.seed)
    model = runs.build_model(spec, split)
    assert spec.run.name == name and len(split.test) > 0
    assert model.output_shape[-1] >= split.classes


def test_recipes_of_other_frameworks_are_tested_beside_them():
    assert set(recipe.built_in()) - SMALLER.keys() == {"cnn-torch"}  # tests/guests/test_modules.py


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SMALLER)
def test_a_built_in_recipe_trains_alike_on_one_rank_and_on_two(name, tmp_path):
    short = ["run.epochs=", f"run.steps={STEPS}", f"run.interval_steps={STEPS}"]
    spec = recipe.load(name, [*short, *SMALLER[name]])
    item, two = (
        run_on("threads", p, lambda w, p=p: runs.train(spec, w, tmp_path / f"{p}", False))[0]
        for p in (1, 2)
    )
    for key in ("train_loss", "test_loss"):
        assert two[key] == pytest.approx(item[key], rel=1e-4)
    assert item["steps"] == two["steps"] == STEPS


def trained(hpctrain, tmp_path, name: str, ranks: int, **keys: object) -> tuple[dict, list[dict]]:
    """Return the summary and the rows of a built-in recipe, trained by `launch` to its end."""
    out = tmp_path / f"{name}-{ranks}"
    completed = hpctrain(
        "launch", "-n", ranks, "train", name, "--out", out, *sets(**keys), timeout=2400
    )
    assert completed.returncode == 0, completed.stderr
    rows = (out / "metrics.jsonl").read_text().splitlines()
    return json.loads((out / "summary.json").read_text()), list(map(json.loads, rows))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_mnist_is_learned(hpctrain, tmp_path):
    summary, _ = trained(hpctrain, tmp_path, "mnist", 2)
    assert summary["test_accuracy"] >= 0.98


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_pylm_is_learned_along_one_curve_on_any_number_of_ranks(hpctrain, tmp_path):
    runs_ = [trained(hpctrain, tmp_path, "pylm", ranks) for ranks in (1, 2, 4)]
    (item, rows), *rest = runs_
    for summary, remote in rest:
        assert summary["test_loss"] == pytest.approx(item["test_loss"], rel=0.01)
        for a, b in zip(remote, rows, strict=True):
            assert a["train_loss"] == pytest.approx(b["train_loss"], rel=0.01)
    assert item["test_loss"] / log(2) < 2.6
