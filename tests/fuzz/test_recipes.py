"""Recipes with random faults and random --set: one error, or the values that were written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from fuzz import Generator, campaign, in_memory, mutated, mutated_json, value_or_refusal
from hpctrain import data, optim
from hpctrain.core.config import paths
from hpctrain.core.config.overrides import RIVALS
from hpctrain.core.errors import UsageError
from hpctrain.gradients.arena import Slot
from hpctrain.training import recipe
from hpctrain.training.recipe import Recipe

DIGITS = recipe.read_tables("digits")
#: Recipes that have most of all keys between them: what stands here replaces tables of `digits`.
VARIANTS: list[dict[str, Any]] = [
    {},
    recipe.read_tables("mnist"),
    recipe.read_tables("pylm"),
    {"run": {"name": "a b", "steps": 9, "seed": 2**64 - 1, "callbacks": ["a:b"], "prefetch": 0,
             "evaluate_steps": 3, "timeout_s": 1.5, "not_finite": "skip", "max_skipped": 3,
             "precision": "float64", "epoch_samples": 7},
     "model": {"kind": "cnn", "channels": [8, 16], "hidden": 9, "dropout": 0.5, "init": "a/b"},
     "data": {"kind": "npz", "path": "a.npz", "shift": 1, "flip": True, "scale": "minmax"},
     "schedule": {"kind": "step", "at_epochs": [1, 2.5], "factor": 0.5, "warm_up_epochs": 0.5}},
    {"data": {"kind": "npy", "x": "x.npy", "y": "y.npy", "classes": 3},
     "engine": {"kind": "ps-async", "servers": 2, "staleness": 3, "delay_compensation": 0.5},
     "optimizer": {"kind": "adamw", "rate": 0.1, "beta1": 0.5, "epsilon": 1e-3,
                   "batch_per_rank": 8, "base_batch": 16, "micro_batches": 2}},
    {"data": {"kind": "idx", "images": "a", "labels": "b", "test_images": "c", "test_labels": "d"},
     "engine": {"kind": "local-sgd", "period": 4}, "early_stop": {"patience": 3, "min_delta": 0.1},
     "optimizer": {"kind": "lamb", "rate": 0.1, "weight_decay": 0.0, "batch": 8}},
    {"data": {"kind": "a:b", "any": [1, {"thing": 1979}], "when": True},
     "model": {"kind": "a.b:c", "x": 0.5}, "engine": {"kind": "easgd", "period": 2},
     "optimizer": {"kind": "lars", "rate": 0.1, "trust": 0.5, "batch": 8},
     "faults": {"slow_rank": 0, "slow_factor": 2.0, "jitter": 0.5, "step_ms": 1.0}},
    {"wire": {"algorithm": "ring", "bucket_bytes": 4096, "overlap": "never"},
     "trace": {"enabled": True}, "checkpoint": {"every_steps": 5, "keep_best": "test_loss"}},
]  # fmt: skip
RECIPES = [{**DIGITS, **variant} for variant in VARIANTS]
KEYS = sorted({f"{t}.{k}" for r in RECIPES for t, v in r.items() if t != "schema" for k in v})
VALUES = (
    "", "", "0", "1", "3", "-1", "0.5", "1e308", "1e400", "inf", "nan", "9" * 5000, "0xff",
    "0x" + "f" * 5000, str(2**64), "true", "[]", "{}", "[1, 2]", "[inf]", "['a:b']", "[" * 5000,
    "[" * 40 + "]" * 40, "{" + "a." * 5000 + "b = 1}", "a.b:c", "ring", "sgd", "cosine", "step",
    "mlp", "text", "ps-sync", '"\\u0000"', "\0", "\udcff", "\x1b[2J", "3\nseed = 4", "1979-05-27",
    "'", '"""', "../../x", "~nobody/x", "# 3", "a" * 9000,
)  # fmt: skip
ODD_SETTINGS = ("", "=", "run", "run=3", "run.=3", ".a=3", "schema=1", "runn.a=1", "a.b.c=1",
                "run.\udcff=1", "run.\x1b[31m=1", "run.epochs.a=3",
                f"run.{'a' * 9000}=1")  # fmt: skip
#: Settings that each of the recipes takes, with what then stands there.
GOOD = {
    "run.steps=3": 3, "run.epochs=4": 4, "run.seed=7": 7, "run.name=a b": "a b",
    "run.evaluate_steps=2": 2, "run.evaluate_epochs=5": 5, "optimizer.rate = 0.5": 0.5,
    "optimizer.batch_per_rank=4": 4, "checkpoint.keep=1": 1,
}  # fmt: skip
PLACES = ("a.toml", "[", "--set", "recipe", "table", "unknown", "'")


def setting(rng: Generator) -> str:
    if rng.random() < 0.1:
        return rng.choice(ODD_SETTINGS)
    return f"{rng.choice(KEYS)}={rng.choice(VALUES)}"


def text_of(tables: dict[str, Any]) -> bytes | None:
    """Return the TOML of `tables`; None where it cannot say it, as null."""
    try:
        return tomli_w.dumps(tables).encode()
    except (TypeError, ValueError, AttributeError):
        return None


def case(rng: Generator, folder: Path) -> None:
    tables = deepcopy(rng.choice(RECIPES))
    kind = rng.choice(("whole", "values", "values", "bytes"))
    if kind == "values":
        tables = mutated_json(tables, rng)
    text = text_of(tables)
    if text is None or not isinstance(tables, dict):
        return
    if kind == "bytes":
        text = mutated(text, rng)
    settings = [setting(rng) for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))]
    path = folder / "a.toml"
    path.write_bytes(text)
    spec = value_or_refusal(lambda: recipe.load(str(path), settings), *PLACES)
    if isinstance(spec, UsageError):
        assert kind != "whole" or settings, spec
        return
    if kind != "bytes":
        survive(tables, settings, spec)
    is_read_again(spec, path)
    can_be_built(spec, rng)


def survive(tables: dict[str, Any], settings: list[str], spec: Recipe) -> None:
    """What was not set, and has no rival that was, is what it was; options hold what tables do."""
    touched = {tuple(item.partition("=")[0].strip().split(".", 1)) for item in settings}
    rivals = {(table, other) for table, key in touched for pair in RIVALS.get(table, ())
              if key in pair for other in pair} | {("model", "init")}  # fmt: skip
    written = paths.as_written(spec.tables, data.path_keys(spec.tables), spec.written)
    for table, key, value in entries(tables):
        if (table, key) not in touched | rivals:
            assert same(written[table][key], value), (table, key)
    for table in ("run", "checkpoint", "trace", "faults"):
        for key, value in spec.tables.get(table, {}).items():
            assert same(getattr(getattr(spec, table), key), value), (table, key)


def good_case(rng: Generator, folder: Path) -> None:
    """Good settings of a good recipe are all taken; they leave no rival, or are rivals."""
    tables, path = deepcopy(rng.choice(RECIPES)), folder / "a.toml"
    path.write_text(tomli_w.dumps(tables))
    settings = rng.sample(list(GOOD), rng.randint(1, 4))
    spec = value_or_refusal(lambda: recipe.load(str(path), settings), "exactly one", "not both")
    keys = {tuple(item.partition("=")[0].strip().split(".")): GOOD[item] for item in settings}
    pairs = [{(table, key) for key in pair} for table, all_ in RIVALS.items() for pair in all_]
    assert isinstance(spec, UsageError) == any(pair <= keys.keys() for pair in pairs), spec
    if not isinstance(spec, UsageError):
        survive(tables, settings, spec)
        assert all(spec.tables[table][key] == value for (table, key), value in keys.items())


def entries(tables: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    return ((t, k, v) for t, table in tables.items() if t != "schema" for k, v in table.items())


def same(a: Any, b: Any) -> bool:
    return a == b or repr(a) == repr(b)  # nan


def is_read_again(spec: Recipe, path: Path) -> None:
    path.write_text(spec.toml(), encoding="utf-8", newline="")
    again = recipe.load(str(path))
    assert (again.toml(), again.sha256) == (spec.toml(), spec.sha256)
    assert same(again, spec)


def can_be_built(spec: Recipe, rng: Generator) -> None:
    """Schedule and optimizer are made, and do an update; a model is described, or refused."""
    per_epoch = rng.choice((1, 7, 2**40))
    total = spec.run.steps or spec.run.epochs * per_epoch
    schedule = spec.schedule.build(
        spec.optimizer.rate * spec.batch.rate_factor(3), per_epoch, total
    )
    assert all(not math.isnan(schedule(step)) for step in (0, 1, 1000, total))
    param, grad = np.zeros(2), np.ones(2)
    created: optim.Optimizer = spec.optimizer.build(schedule)
    slots = [Slot("a", (2,), 0)]
    with np.errstate(all="ignore"):
        created.update(grad, created.init(param), param, slots, lambda rows: rows)
    value_or_refusal(lambda: spec.must_fit(rng.randint(1, 5)))
    deep = max(getattr(spec.model, "layers", 0), getattr(spec.model, "blocks", 0)) > 100
    if not deep and not hasattr(spec.model, "target"):
        shape = rng.choice(((64,), (8, 8), (128,), (28, 28, 1)))
        value_or_refusal(lambda: spec.model.build(shape, 10), "model", "layer")


@pytest.mark.parametrize(
    "count", [400, pytest.param(100_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
)
def test_recipes(count):
    with in_memory() as folder:
        campaign("recipes", count, partial(case, folder=folder))
        campaign("good settings", count // 10, partial(good_case, folder=folder))
