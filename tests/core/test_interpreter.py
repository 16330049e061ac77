"""Python child processes: a module beside the recipe cannot replace one of the standard library."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import BIN

from hpctrain.core.interpreter import module_command

# "-P" is refused by Python 3.10, where the other way is taken; that works in every version.
VERSIONS = [(3, 10), *([(3, 11)] if sys.version_info >= (3, 11) else [])]
SHADOW = "import os; os._exit(99)  # in place of the standard library's: this process is lost\n"
RECIPE = """
schema = 1
run = { name = "mine", steps = 2 }
data = { kind = "mine:data" }
model = { kind = "mlp", widths = [1, 4, 2] }
optimizer = { kind = "sgd", rate = 0.1, batch = 8 }
"""
MODULE = """
import copy, queue, random  # the standard library's
from helper import COUNT
def data(): return ([[random.random()] for _ in range(COUNT)], [0, 1] * (COUNT // 2)), None
random.seed(0)
"""


@pytest.fixture
def shadows(tmp_path):
    """A folder with a recipe, and a file of the name of every module of the standard library."""
    for name in sys.stdlib_module_names:
        (tmp_path / f"{name}.py").write_text(SHADOW)
    (tmp_path / "my.toml").write_text(RECIPE)
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "helper.py").write_text("COUNT = 32")
    return tmp_path


@pytest.mark.sample(1)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_child_runs_a_module_and_no_file_of_its_folder(shadows, version):
    line = [*module_command("hpctrain", version), "train", "--help"]
    completed = subprocess.run(line, cwd=shadows, capture_output=True, text=True)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert "hpctrain train" in completed.stdout


@pytest.mark.sample(1)
@pytest.mark.processes
@pytest.mark.parametrize("launch", [[], ["launch", "-n", "2"]], ids=["train", "launch"])
@pytest.mark.either
def test_files_named_like_the_standard_librarys_break_nothing(shadows, start, launch):
    ended = start(BIN / "hpctrain", *launch, "train", "my.toml", "--out", "run").finish()
    assert ended.returncode == 0, ended.stderr
    assert (shadows / "run" / "summary.json").exists()
