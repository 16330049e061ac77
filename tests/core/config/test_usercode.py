"""Code named by recipes: where it is imported from, and whose code may run."""

from __future__ import annotations

import builtins
import hashlib
import importlib.util
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from ranks import run_on

from hpctrain.commands.checkpoint import checkpoint as checkpoint_command
from hpctrain.commands.checkpoint import evaluate as evaluate_command
from hpctrain.commands.runs import report as report_command
from hpctrain.core.config import code_ownership, usercode
from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.training import recipe, runs

RECIPE = """
schema = 1
run = {{ name = "mine", steps = 2, callbacks = ["{module}:callback"] }}
data = {{ kind = "{module}:data" }}
model = {{ kind = "{module}:model", width = 3 }}
optimizer = {{ kind = "sgd", rate = 0.1, batch = 8 }}
"""
MODULE = """
import functools
from builtins import exec as execute
from os import system
from pathlib import Path
from random import choice
from subprocess import check_output
from numpy import asarray

import hpctrain as ht

Path(__file__).with_name("ran").touch()  # whoever imports this runs code
append = [].append
upper = str.upper
wrapped = functools.partial(system, "true")

@functools.lru_cache
def data():
    x, y = [[float(i)] for i in range(16)], [0, 1] * 8
    return (x, y), (x, y)

def model(input_shape, classes, width):
    return ht.nn.Model({"out": ht.nn.Linear(classes)}, input_shape)

def callback(row):
    return None
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a recipe and its module, which has another name in each test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"mine_{random.getrandbits(64):x}"
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / f"{name}.py").write_text(MODULE)
    (folder / "my.toml").write_text(RECIPE.format(module=name))
    yield folder / f"{name}.py"
    for imported in [imported for imported in sys.modules if name in imported]:
        del sys.modules[imported]


def sha256_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def load(module: Path) -> recipe.Recipe:
    return recipe.load(str(module.with_name("my.toml")))


def train(spec: recipe.Recipe, out: Path) -> dict:
    return run_on("threads", 1, lambda world: runs.train(spec, world, out, False))[0]


def test_modules_of_the_standard_library_are_refused_and_not_imported():
    recipe.load("digits")  # what that itself imports is there now
    before = set(sys.modules)
    for name in sorted(sys.stdlib_module_names):  # `antigravity` would open a browser
        for target in (f"{name}:system", f"{name}.path:join"):
            with pytest.raises(UsageError, match=f"'{target}'.*seen Python's own module {name}$"):
                recipe.load("digits", [f"data.kind={target}"])
    assert set(sys.modules) == before


@pytest.mark.parametrize("place", ["data.kind=", "model.kind=", "run.callbacks="])
@pytest.mark.parametrize("target", ["os:system", "builtins:exec", "subprocess:run", "__main__:x"])
def test_whatever_names_it(target, place):
    arguments = f'["{target}"]' if "callbacks" in place else target
    table = place.partition(".")[0]
    with pytest.raises(UsageError, match=rf"\[{table}\] .*'{target}': expected a function of a"):
        recipe.load("digits", [f"{place}{arguments}"])


@pytest.mark.parametrize(
    "name, origin",
    [("system", "posix"), ("execute", "builtins"), ("choice", "random"), ("append", "builtins"),
     ("check_output", "subprocess"), ("upper", "builtins")],
)  # fmt: skip
def test_functions_of_the_standard_library_are_refused_by_any_name(project, name, origin):
    with pytest.raises(UsageError, match=f"seen one of Python's own module {origin}$"):
        usercode.find(f"{project.stem}:{name}", "[data] kind", str(project.parent))


@pytest.mark.parametrize("name, result", [("data", True), ("asarray", True), ("wrapped", False)])
def test_functions_of_users_and_of_packages_are_taken(project, name, result):
    arguments = (f"{project.stem}:{name}", "[data] kind", str(project.parent))
    if result:
        assert callable(usercode.find(*arguments))
    else:
        with pytest.raises(UsageError, match="unknown function"):
            usercode.find(*arguments)


@pytest.mark.parametrize(
    "target", ["a b:c", "../x:y", "x:y.z", "/etc/x:y", "x..y:z", ".x:y", "x:", ":y", "x:1"]
)
def test_what_is_no_name_is_refused(target):
    with pytest.raises(UsageError, match=r"expected 'package\.module:function'"):
        recipe.load("digits", [f'run.callbacks=["{target}"]'])


def test_modules_lie_beside_the_recipe_not_where_the_command_was_started(
    project, tmp_path, monkeypatch
):
    (tmp_path / project.name).write_text("def data(): raise RuntimeError('of another folder')")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert train(recipe.load("project/my.toml"), tmp_path / "run")["status"] == "done"
    assert sys.modules[project.stem].__file__ == str(project)
    assert sys.path == [*before, str(project.parent)]


def test_of_a_built_in_recipe_they_lie_where_the_command_was_started(project, monkeypatch):
    monkeypatch.chdir(project.parent)
    spec = recipe.load("digits", [f"data.kind={project.stem}:data"])
    assert spec.tables["code"]["folder"] == str(project.parent)
    assert len(spec.data.load(0).train) == 16


@pytest.mark.parametrize("hidden", ["file", "package", "folder"])
def test_a_module_that_a_package_hides_is_refused(project, hidden):
    beside = project.with_name("click.py" if hidden == "file" else "click")
    if hidden == "file":
        beside.touch()
    else:
        beside.mkdir()
        (beside / ("__init__.py" if hidden == "package" else "data.csv")).touch()
    arguments = ("click:echo", "[data] kind", str(project.parent))
    if hidden == "folder":  # without __init__.py it hides nothing, nor is it hidden
        assert usercode.find(*arguments) is sys.modules["click"].echo
    else:
        with pytest.raises(UsageError, match=rf"Python takes .*click.*; rename {beside}"):
            usercode.find(*arguments)


def test_the_recipe_of_a_run_keeps_folder_and_hash(project, tmp_path, caplog):
    spec = load(project)
    train(spec, tmp_path / "run")
    saved = recipe.load(str(tmp_path / "run" / run_folder.RECIPE))
    assert saved.tables["code"] == {
        "folder": str(project.parent),
        "sha256": {project.stem: sha256_of(project)},
    }
    assert saved.toml() == spec.toml()
    assert "code has changed" not in caplog.text
    project.write_text(MODULE + "# another line")
    del sys.modules[project.stem]
    train(recipe.load(str(tmp_path / "run" / run_folder.RECIPE)), tmp_path / "again")
    assert f"code has changed since the run was recorded: module {project.stem}" in caplog.text


def test_the_hash_is_of_the_code_that_runs_after_its_file_was_edited(project, tmp_path):
    before = sha256_of(project)
    train(load(project), tmp_path / "run")
    project.write_text(MODULE + "# another line")
    assert load(project).code.sha256 == {project.stem: before}
    del sys.modules[project.stem]
    assert load(project).code.sha256 == {project.stem: sha256_of(project)} != {project.stem: before}


LAYER = """
class Layer:
    @staticmethod
    def epsilon():
        return 1e-3
"""
# what is done between a program's own import of a module and the reading of a recipe
AFTER_IMPORT = {
    "nothing": lambda module: None,
    "a function": lambda module: module.write_text(MODULE.replace("[0, 1] * 8", "[1, 0] * 8")),
    "a method": lambda module: module.write_text(f"{LAYER}{MODULE}".replace("1e-3", "1e-4")),
    "a constant": lambda module: module.write_text(MODULE + "RATE = 0.2"),
    "no Python": lambda module: module.write_text("def"),
    "replaced by bytecode": lambda module: None,
}


@pytest.mark.parametrize("change", AFTER_IMPORT)
def test_a_module_imported_before_is_hashed_only_as_it_runs(project, monkeypatch, change):
    monkeypatch.setattr(sys, "dont_write_bytecode", change not in ("nothing", "a constant"))
    monkeypatch.syspath_prepend(str(project.parent))
    if change == "a method":
        project.write_text(LAYER + MODULE)
    elif change == "replaced by bytecode":
        bytecode = Path(importlib.util.cache_from_source(str(project)))
        bytecode.parent.mkdir()
        code = compile(MODULE.replace("[0, 1] * 8", "[1, 0] * 8"), str(project), "exec")
        bytecode.write_bytes(importlib._bootstrap_external._code_to_hash_pyc(code, bytes(8), False))
    importlib.import_module(project.stem)
    AFTER_IMPORT[change](project)
    if change == "nothing":
        assert load(project).code.sha256 == {project.stem: sha256_of(project)}
    else:
        with pytest.raises(UsageError, match=f"{project.stem} runs other code than its file"):
            load(project)


def test_without_own_code_nothing_is_kept():
    assert "code" not in recipe.load("digits", ["code.folder=/x"]).tables
    with pytest.raises(UsageError, match=r"\[code\] folder: expected an absolute path, seen 'x'"):
        recipe.load("digits", ["code.folder=x"])


def test_ranks_with_different_code_are_refused(project, tmp_path):
    spec = load(project)
    other = replace(spec, code=replace(spec.code, sha256={project.stem: "0" * 64}))
    with pytest.raises(UsageError, match="the code that the recipe names"):
        run_on(
            "threads", 2,
            lambda w: runs.train(spec if w.rank else other, w, tmp_path / "run", False),
        )  # fmt: skip


# ---- whose code is run ----


@pytest.fixture
def trained(project, tmp_path):
    """A run of the project's recipe, and its module; nothing of it was imported or run yet."""
    train(load(project), tmp_path / "run")
    del sys.modules[project.stem]
    project.with_name("ran").unlink()
    return tmp_path / "run", project


def forget(run: Path, module: Path) -> None:
    file = run / run_folder.RECIPE
    file.write_text(file.read_text().partition("[code]")[0] + f'[code]\nfolder="{module.parent}"')


def opened(path: Path, bits: int) -> None:
    path.chmod(path.stat().st_mode | bits)


# name: (what is done to run and module, what the refusal says)
STRANGE = {
    "run": (lambda run, module: opened(run, 0o2), "run: every user may write to it; chmod o-w"),
    "recipe": (
        lambda run, module: opened(run / run_folder.RECIPE, 0o2),
        "recipe.toml: every user may write",
    ),
    "folder": (lambda run, module: opened(module.parent, 0o2), "project: every user may write"),
    "module": (lambda run, module: opened(module, 0o2), ".py: every user may write"),
    "changed": (lambda run, module: module.write_text(MODULE + "#"), "expected SHA-256 "),
    "no hash": (forget, "no SHA-256 is recorded, seen "),
}


@pytest.mark.parametrize("case", STRANGE)
def test_strange_code_is_run_with_trust_alone(trained, case):
    run, module = trained
    change, message = STRANGE[case]
    change(run, module)
    refused = CliRunner().invoke(evaluate_command, [str(run)])
    assert isinstance(refused.exception, UsageError) and message in str(refused.exception)
    assert "add --trust (in Python: trust=True)" in str(refused.exception)
    with pytest.raises(UsageError, match="which is not run"):
        runs.load(run)
    assert not module.with_name("ran").exists() and module.stem not in sys.modules
    assert CliRunner().invoke(evaluate_command, [str(run), "--trust"]).exit_code == 0
    assert module.with_name("ran").exists()
    assert runs.load(run, trust=True) is not None


@pytest.mark.parametrize("name", ["module", "package", "imported by it"])
def test_bytecode_of_other_code_is_not_run(project, tmp_path, name):
    """Python would run it unchecked, in place of the source that the hash covers."""
    module, other = project, project.with_name("other").as_posix()
    if name == "package":
        module = project.with_name(f"p{project.stem}") / "__init__.py"
        module.parent.mkdir()
        shutil.copy(project, module.parent / "mine.py")
        recipe_file = project.with_name("my.toml")
        recipe_file.write_text(RECIPE.format(module=f"{module.parent.name}.mine"))
        module.write_text("")
    elif name == "imported by it":
        module = project.with_name(f"{project.stem}_.py")
        module.write_text("")
        project.write_text(f"import {module.stem}\n{MODULE}")
    train(load(project), tmp_path / "run")
    for imported in [imported for imported in sys.modules if project.stem in imported]:
        del sys.modules[imported]
    bytecode = Path(importlib.util.cache_from_source(str(module)))
    bytecode.parent.mkdir(exist_ok=True)
    code = compile(f"open({other!r}, 'w')\n" + module.read_text(), str(module), "exec")
    bytecode.write_bytes(importlib._bootstrap_external._code_to_hash_pyc(code, bytes(8), False))
    assert runs.evaluate(tmp_path / "run")["samples"] == 16
    assert not os.path.exists(other)
    if name == "package":
        module.write_text("#")
        del sys.modules[module.parent.name]
        with pytest.raises(UsageError, match=f"module {module.parent.name} .*expected SHA-256"):
            runs.evaluate(tmp_path / "run")


def test_own_code_is_run(trained):
    run, module = trained
    assert runs.evaluate(run)["samples"] == 16
    assert module.with_name("ran").exists()


def test_of_another_user_it_is_strange(trained, monkeypatch):
    run, module = trained
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UsageError) as refused:
        runs.evaluate(run)
    for path in (run, run / run_folder.RECIPE, module.parent, module):
        assert f"\n  {path}: expected your own, seen a file of " in str(refused.value)
    assert not module.with_name("ran").exists()


@pytest.mark.parametrize(
    "members, group, strange",
    [([], "me", False), (["me"], "me", False), (["me", "you"], "me", True), ([], "team", True),
     (None, "", True)],
)  # fmt: skip
def test_a_group_may_write_that_is_the_users_alone(trained, monkeypatch, members, group, strange):
    run, _ = trained
    opened(run, 0o20)

    def entry(_):
        if members is None:
            raise KeyError
        return code_ownership.grp.struct_group((group, "x", 1, members))

    monkeypatch.setattr(code_ownership.grp, "getgrgid", entry)
    monkeypatch.setattr(code_ownership, "_user_name", lambda _: "me")
    if strange:
        with pytest.raises(UsageError, match=r"run: its group .* may write to it; chmod g-w"):
            runs.evaluate(run)
    else:
        runs.evaluate(run)


def test_what_needs_no_code_runs_none(trained):
    run, module = trained
    for command, *words in [
        (report_command, str(run)),
        (checkpoint_command, "list", str(run)),
        (checkpoint_command, "verify", str(run)),
        (checkpoint_command, "export", str(run)),
    ]:
        completed = CliRunner().invoke(command, words)
        assert completed.exit_code == 0, (command, completed.output, completed.exception)
    assert not module.with_name("ran").exists() and module.stem not in sys.modules


def test_an_evaluated_recipe_that_names_a_builtin_is_refused_with_trust_too(trained, monkeypatch):
    run, module = trained
    file = run / run_folder.RECIPE
    file.write_text(file.read_text().replace(f"{module.stem}:data", "subprocess:run"))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it ran"))
    monkeypatch.setattr(builtins, "exec", lambda *_: pytest.fail("it ran"))
    with pytest.raises(UsageError, match="seen Python's own module subprocess"):
        runs.evaluate(run, trust=True)


@pytest.mark.processes
@pytest.mark.either
def test_one_rank_says_that_it_is_refused(hpctrain, project):
    arguments = ("train", project.with_name("my.toml"), "--set", "data.kind=os:system")
    ended = hpctrain(*arguments, ranks=3)
    assert ended.returncode == 2
    assert ended.stderr.count("seen Python's own module os") == 1
