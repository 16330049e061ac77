"""Recipes that extend others, and the commands that list, show, begin, check and compare them."""

from __future__ import annotations

import hashlib
import os
import re

import numpy as np
import pytest
import tomli_w
from click.testing import CliRunner
from ranks import run_on

from hpctrain.commands.recipe import recipe as command
from hpctrain.core.config import toml
from hpctrain.core.errors import UsageError
from hpctrain.training import recipe
from hpctrain.training.dry_run import dry_run
from hpctrain.training.recipe_keys import list_all_keys

BASE = """schema = 1
[run]
name = "base"
epochs = 3
seed = 5
[model]
kind = "mlp"
widths = [64, 8, 10]
[data]
kind = "digits"
[optimizer]
kind = "sgd"
rate = 0.1
momentum = 0.9
batch = 32
"""

#: name: the file that extends BASE; expected keys, "" for none
EXTENDING = {
    "a key": ("[run]\nseed = 7", {"run.seed": 7, "run.epochs": 3, "optimizer.momentum": 0.9}),
    "a rival key": ("[run]\nsteps = 4", {"run.steps": 4, "run.epochs": None, "run.seed": 5}),
    "a new table": ("[wire]\nalgorithm = 'ring'", {"wire.algorithm": "ring", "run.seed": 5}),
    "the same kind": ("[model]\nkind = 'mlp'\ndropout = 0.5",
                      {"model.widths": [64, 8, 10], "model.dropout": 0.5}),
    "another kind": ("[optimizer]\nkind = 'adamw'\nrate = 0.01\nbatch_per_rank = 8",
                     {"optimizer.momentum": None, "optimizer.batch": None,
                      "optimizer.batch_per_rank": 8}),
}  # fmt: skip


def value_of(tables, path):
    table, _, key = path.partition(".")
    return tables[table].get(key)


@pytest.mark.parametrize("name", EXTENDING)
def test_a_recipe_extends_another_beside_it(tmp_path, monkeypatch, name):
    text, expected = EXTENDING[name]
    (tmp_path / "below").mkdir()
    (tmp_path / "base.toml").write_text(BASE)
    middle = 'schema = 1\nextends = "../base.toml"\n'
    (tmp_path / "below" / "middle.toml").write_text(middle)
    (tmp_path / "below" / "my.toml").write_text(f'schema = 1\nextends = "middle.toml"\n{text}\n')
    monkeypatch.chdir("/")
    spec = recipe.load(str(tmp_path / "below" / "my.toml"))
    assert {path: value_of(spec.tables, path) for path in expected} == expected
    assert "extends" not in spec.tables
    assert recipe.check(toml.parse(spec.toml(), "written")).tables == spec.tables


def test_a_recipe_extends_a_built_in_one(tmp_path):
    (tmp_path / "my.toml").write_text('schema = 1\nextends = "digits"\n[run]\nname = "mine"\n')
    spec = recipe.load(str(tmp_path / "my.toml"), ["run.steps=2"])
    assert (spec.run.name, spec.run.steps, spec.run.epochs) == ("mine", 2, None)
    assert spec.optimizer == recipe.load("digits").optimizer


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('extends = "my.toml"', "extends itself: "),
        ('extends = "other.toml"', "extends itself: "),
        ('extends = "nothing.toml"', "nothing.toml', which does not exist"),
        ('extends = "digit"', "unknown recipe 'digit'; did you mean 'digits'?"),
        ("extends = 3", "extends: expected the name of a recipe or a .toml file, seen 3"),
        ('extends = ""', "extends: expected the name of a recipe or a .toml file, seen ''"),
        ('extends = "digits"\nrun = 3', "'run' is a table"),
        ('extends = "digits"\n[model]\nwidth = 3', "my.toml: unknown key in [model]: 'width'"),
    ],
)
def test_what_cannot_be_extended_is_refused(tmp_path, line, message):
    (tmp_path / "my.toml").write_text(f"schema = 1\n{line}\n")
    (tmp_path / "other.toml").write_text('schema = 1\nextends = "my.toml"\n')
    with pytest.raises(UsageError) as refused:
        recipe.load(str(tmp_path / "my.toml"))
    assert message in str(refused.value)


@pytest.mark.parametrize("settings", [[], ["run.seed=7"]])
def test_a_fault_of_a_file_has_its_name_whatever_is_set(tmp_path, settings):
    path = tmp_path / "my.toml"
    path.write_text('schema = 1\nextends = "digits"\n[model]\nwidth = 3\n')
    with pytest.raises(UsageError) as refused:
        recipe.load(str(path), settings)
    assert str(refused.value).startswith(f"{path}: unknown key in [model]: 'width'")


# --- Paths ---------------------------------------------------------------------------------------

RUN = """schema = 1
[run]
name = "paths"
epochs = 1
[model]
kind = "mlp"
widths = [4, 3]
[optimizer]
kind = "sgd"
rate = 0.1
batch = 8
"""
#: table: its paths, below the folder of the recipe
TABLES = {
    "npz": ('kind = "npz"\npath = "in/d.npz"', {"path": "in/d.npz"}),
    "npy": ('kind = "npy"\nx = "./in/x.npy"\ny = "../y.npy"', {"x": "./in/x.npy", "y": "../y.npy"}),
    "idx": ('kind = "idx"\nimages = "i"\nlabels = "/l"', {"images": "i"}),
    "text": ('kind = "text"\nfiles = ["*.txt", "/t"]', {"files": "*.txt"}),
    "home": ('kind = "npz"\npath = "~/d.npz"', {}),
    "digits": ('kind = "digits"', {}),
    "a function": ('kind = "mine:data"\npath = "in/d.npz"', {}),
}


@pytest.mark.parametrize("name", TABLES)
def test_paths_are_relative_to_the_recipe_and_its_hash_is_of_the_text(tmp_path, monkeypatch, name):
    text, relative = TABLES[name]
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "my.toml"
    file.write_text(f"{RUN}[data]\n{text}\n")
    monkeypatch.chdir("/")
    spec = recipe.load("./" + os.path.relpath(file, "/"))
    values = spec.tables["data"]
    for key, path in relative.items():
        value = values[key][0] if isinstance(values[key], list) else values[key]
        assert value == os.path.join(tmp_path / "a", path)
    tables = {**toml.parse(file.read_text(), "file")}
    if "function" in name:
        tables["code"] = spec.tables["code"]
    assert spec.sha256 == hashlib.sha256(tomli_w.dumps(tables).encode()).hexdigest()
    (tmp_path / "copy.toml").write_text(spec.toml())  # as a run has it
    copy = recipe.load(str(tmp_path / "copy.toml"))
    assert (copy.sha256, copy.tables, copy.toml()) == (spec.sha256, spec.tables, spec.toml())


def test_a_path_belongs_to_the_file_or_the_command_line_that_names_it(tmp_path, monkeypatch):
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a/base.toml").write_text(f'{RUN}[data]\nkind = "npy"\nx = "x"\ny = "y"\n')
    extending = 'schema = 1\nextends = "../a/base.toml"\n[data]\ny = "y"\n[model]\ninit = "w"\n'
    (tmp_path / "b/my.toml").write_text(extending)
    monkeypatch.chdir(tmp_path / "c")
    spec = recipe.load("../b/my.toml", ["data.x_test=x", "data.y_test=y"])
    assert {key: os.path.realpath(spec.tables["data"][key]) for key in ("x", "y", "x_test")} == {
        "x": str(tmp_path / "a/x"), "y": str(tmp_path / "b/y"), "x_test": str(tmp_path / "c/x"),
    }  # fmt: skip
    assert os.path.realpath(spec.init) == str(tmp_path / "b/w")
    assert "paths" not in toml.parse(call("show", "../b/my.toml"), "shown")


def test_a_path_from_the_current_folder_is_refused_with_the_right_one(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "d.npz").touch()
    (tmp_path / "recipes/my.toml").write_text(f'{RUN}[data]\nkind = "npz"\npath = "d.npz"\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"paths are relative to the recipe: .* write '../d.npz'"):
        recipe.load("recipes/my.toml")


def test_a_table_of_paths_that_no_run_wrote_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"\[paths\]: expected a table of texts"):
        recipe.check({"schema": 1, "paths": {"/x": 3}})


X, Y = np.arange(40.0).reshape(10, 4), np.arange(10) % 3
#: arrays; a change of the recipe; the part of the error
UNTRAINABLE = {
    "a missing file": (None, [], "x.npy"),
    "other widths": ((X[:, :3], Y), [], "3"),
    "too few outputs": ((X, Y + 1), [], "expected at least 4 last"),
    "lengths": ((X[:9], Y), [], "9 samples but y has 10"),
    "nan": ((np.where(X == 5, np.nan, X), Y), [], "nan in sample 1, column 1"),
    "no class": ((X, Y), ["data.classes=2"], "label 2 of sample 2"),
}


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_check_finds_the_faults_of_the_data_as_a_training_does(tmp_path, name):
    arrays, settings, message = UNTRAINABLE[name]
    (tmp_path / "my.toml").write_text(f'{RUN}[data]\nkind = "npy"\nx = "x.npy"\ny = "y.npy"\n')
    for file, array in zip(("x", "y"), arrays or (), strict=False):
        np.save(tmp_path / f"{file}.npy", array)
    sets = [word for setting in settings for word in ("--set", setting)]
    with pytest.raises(UsageError, match=message) as by_check:
        call("check", str(tmp_path / "my.toml"), *sets)
    spec = recipe.load(str(tmp_path / "my.toml"), settings)
    with pytest.raises(UsageError) as by_run:
        run_on("threads", 1, lambda world: dry_run(spec, world, None))
    assert str(by_check.value) == str(by_run.value)


#: row of a test set, its value, the table [model] if not the usual, and the error
LATE_FAULTS = {
    "nan in the last": (39, np.nan, "", "nan in sample 39"),
    "nan in the first": (0, np.nan, "", "nan in sample 0"),
    "nan, a model of the user": (39, np.nan, 'kind = "own:model"', "nan in sample 39"),
    "nan between": (1, np.nan, "", ""),
    "none": (39, 0.5, "", ""),
}


@pytest.mark.parametrize("name", LATE_FAULTS)
def test_check_reads_a_few_samples_of_each_set_and_tells_what_it_left_out(tmp_path, name):
    row, value, model, message = LATE_FAULTS[name]
    x = np.tile(X, (4, 1))
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.tile(Y, 4))
    x[row, 1] = value
    np.save(tmp_path / "z.npy", x)
    (tmp_path / "own.py").write_text("def model(input_shape, outputs): raise RuntimeError")
    keys = 'x = "x.npy"\ny = "y.npy"\nx_test = "z.npy"\ny_test = "y.npy"\n'
    run = RUN.replace('kind = "mlp"\nwidths = [4, 3]', model) if model else RUN
    (tmp_path / "my.toml").write_text(f'{run}[data]\nkind = "npy"\n{keys}')
    words = ("check", str(tmp_path / "my.toml"))
    if message:
        with pytest.raises(UsageError, match=message):
            call(*words)
    else:
        unread = "the values of 24 training samples and 24 test samples; each is checked when it is"
        assert f"not looked at: {unread}" in call(*words)
    assert "not looked at" not in call("check", "digits")


PARTS = ("run", "loss", "data", "batch", "optimizer", "schedule", "engine", "checkpoint", "faults",
         "early_stop", "trace")  # fmt: skip


@pytest.mark.parametrize("settings", [[], ["engine.kind=ps-async"], ["early_stop.patience=3"]])
@pytest.mark.parametrize("name", recipe.built_in())
def test_all_keys_of_a_recipe_are_the_same_recipe(name, settings):
    spec = recipe.load(name, settings)
    tables = list_all_keys(spec)
    again = recipe.check(toml.parse(tomli_w.dumps(tables), "all keys"))
    assert {x: getattr(again, x) for x in PARTS} == {x: getattr(spec, x) for x in PARTS}
    assert tables["run"]["timeout_s"] == 300.0 and tables["optimizer"]["micro_batches"] == 1


def call(*words):
    return CliRunner().invoke(command, words, catch_exceptions=False).stdout


def test_a_recipe_is_begun_checked_and_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert all(name in call("list") for name in recipe.built_in())
    assert call("show", "mnist") == recipe.source("mnist")
    (tmp_path / "more.toml").write_text('schema = 1\nextends = "my.toml"\n')
    assert "wrote my.toml, a copy of mnist" in call("new", "my.toml", "--from", "mnist")
    assert toml.parse(call("show", "my.toml"), "shown")["run"]["name"] == "my"
    assert toml.parse(call("show", "more.toml"), "shown")["data"]["kind"] == "mnist"
    assert call("check", "my.toml").startswith("my.toml: my is a valid recipe")
    assert "run.name" in call("diff", "mnist", "my.toml")
    assert call("diff", "my.toml", "./my.toml") == "no key differs\n"
    assert "timeout_s = 300.0" in call("show", "my.toml", "--all-keys")


DIGITS = 'schema = 1\nextends = "digits"\n'
NAMED = {
    "x.npy": DIGITS + 'data = { kind = "npy", x = "x.npy", y = "/y.npy" }',
    "y.npy": DIGITS + 'data = { kind = "npy", x = "/x.npy", y = "y.npy" }',
    "base.toml": 'schema = 1\nextends = "base.toml"',
    "weights.npz": DIGITS + 'model.init = "weights.npz"',
    "beside": DIGITS + 'data = { kind = "beside:data" }',
    "": DIGITS + 'model.init = "/weights.npz"',
}


@pytest.mark.parametrize("name", NAMED)
def test_a_copy_that_would_name_other_files_is_refused(tmp_path, monkeypatch, name):
    folder = tmp_path / "a"
    folder.mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path)
    (folder / "base.toml").write_text(BASE)
    (folder / "beside.py").write_text("")
    (folder / "my.toml").write_text(NAMED[name])
    assert "wrote a/copy.toml" in call("new", "a/copy.toml", "--from", "a/my.toml")
    if name:
        with pytest.raises(UsageError, match=f"a/my.toml names {re.escape(name)} relative to its"):
            call("new", "b/copy.toml", "--from", "a/my.toml")
    else:
        call("new", "b/copy.toml", "--from", "a/my.toml")
    assert (tmp_path / "b/copy.toml").exists() == (not name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["new", "my.toml"], "my.toml is there already"),
        (["new", "my.txt"], "expected a name that ends with .toml, seen my.txt"),
        (["new", "nothing/my.toml"], "nothing/my.toml cannot be written: No such file"),
        (["new", "mine.toml", "--from", "mnits"], "unknown recipe 'mnits'; did you mean 'mnist'"),
        (["check", "my.toml", "--set", "run.epoch=1"], "unknown key in [run]: 'epoch'; did you me"),
        (["show", "nothing.toml"], "nothing.toml: expected a file"),
    ],
)
def test_bad_commands_are_refused(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text(BASE)
    with pytest.raises(UsageError) as refused:
        call(*words)
    assert str(refused.value).startswith(message)
    assert {path.name for path in tmp_path.iterdir()} == {"my.toml"}
