"""The package: the cost of its import, its version, its public names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import metadata, resources
from tempfile import TemporaryDirectory

import pytest
from click.testing import CliRunner

import hpctrain as ht
from hpctrain import cli


def test_import_leaves_alone():
    late = {"mpi4py.MPI", "cupy", "matplotlib", "jinja2"}
    code = f"import sys, hpctrain; print({late} & set(sys.modules))"
    observed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert observed == "set()\n"


def test_import_of_the_package_imports_none_of_its_modules():
    code = "import sys, hpctrain; print([m for m in sys.modules if m.startswith('hpctrain.')])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_ctrl_c_during_imports_ends_without_a_traceback(tmp_path):
    interrupt = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    (tmp_path / "click.py").write_text(interrupt)
    command = [sys.executable, "-m", "hpctrain", "--version"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def test_version_is_that_of_the_metadata():
    assert ht.__version__ == metadata.version("hpctrain")


def test_public_names_exist_and_are_few():
    assert len(ht.__all__) <= 29 and set(dir(ht)) == {*ht.__all__, "__version__"}
    assert [name for name in ht.__all__ if not hasattr(ht, name)] == []


@pytest.mark.parametrize(
    "file", ["py.typed", "training/recipes/digits.toml", "tools/report/page.html"]
)
def test_package_data_is_there(file):
    assert resources.files("hpctrain").joinpath(file).is_file()


def test_command_is_the_module():
    (command,) = metadata.entry_points(group="console_scripts", name="hpctrain")
    assert callable(command.load())


@pytest.mark.parametrize("requested", ["--help", "--version", "train --help"])
def test_help_is_said_by_one_rank(requested, monkeypatch, capsys):
    message = []
    for rank in "0", "1":
        for variable, value in {"RANK": rank, "LOCAL_RANK": rank, "SIZE": "2"}.items():
            monkeypatch.setenv(f"MV2_COMM_WORLD_{variable}", value)
        monkeypatch.setattr(sys, "argv", ["hpctrain", *requested.split()])
        assert cli._guarded() == 0
        message.append("".join(capsys.readouterr()))
    assert (message[0] != "", message[1]) == (True, "")


@pytest.mark.parametrize("name", ["version", "help"])
def test_an_option_that_was_typed_as_a_command_is_named(name):
    error = CliRunner().invoke(cli.hpctrain, [name]).exception
    assert str(error) == f"unknown command '{name}'; did you mean '--{name}'?"


DRAW = "pipeline draw --schedule 1f1b --stages 4 --micro-batches 8"


@pytest.mark.parametrize("command", [DRAW, "recipe show digits", "--help", "compare --help"])
def test_nothing_is_said_when_nobody_reads_on(command, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hpctrain", *command.split()]
    ended = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, check=False
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")


PAGES = [["--help"], ["train", "--help"], ["tune", "--help"], ["bench", "--help"],
         ["bench", "allreduce", "--help"], ["doctor", "--help"]]  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=" ".join)
def test_beside_four_ranks_stands_what_fewer_cores_want(page):
    output = CliRunner().invoke(cli.hpctrain, page).output
    assert "mpirun -n 4" in output
    assert "mpirun --oversubscribe" in output


def test_a_program_with_an_allreduce_alone_loads_no_more_than_it_needs():
    code = """
import sys
import numpy as np
import hpctrain as ht
ht.init(); x = np.ones(4, np.float32); ht.allreduce(x)
names = {name.split(".")[0] for name in sys.modules}
print(*sorted(names & {"pydantic", "rich", "click", "safetensors", "ml_dtypes"}))
print(*sorted(name for name in sys.modules if name.startswith(("hpctrain.nn", "hpctrain.data"))))
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "\n\n"


def test_the_version_imports_neither_numpy_nor_pydantic():
    code = (
        "import sys; sys.argv = ['hpctrain', '--version']; from hpctrain import cli; cli._guarded()"
    )
    code += "; print(*sorted({'numpy', 'pydantic', 'rich'} & set(sys.modules)))"
    observed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert observed == f"hpctrain, version {ht.__version__}\n\n"


def test_a_rank_without_a_terminal_imports_the_picked_engine_model_and_data_alone():
    code = """
import sys
from hpctrain.training import recipe, runs
from hpctrain.training.journal import Journal
import hpctrain
finish = Journal.finish
def finish_after_check(*arguments):
    rooms = ("hpctrain.engines.", "hpctrain.nn.", "hpctrain.data.")
    unused = {"gossip", "local_sgd", "transformer", "resnet", "attention", "text"}
    names = [n for n in sys.modules if n.startswith(rooms) and n.split(".")[2] in unused]
    print(*sorted(names), *sorted({"rich", "scipy"} & set(sys.modules)))
    return finish(*arguments)
Journal.finish = finish_after_check
spec = recipe.load("digits", ["run.epochs=", "run.steps=1", "run.device=cpu"])
runs.train(spec, hpctrain.init("cpu"), None, False)
"""
    with TemporaryDirectory() as folder:
        output = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=folder)
    assert output == "\n"
