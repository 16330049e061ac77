"""Scripts of Horovod as they are: by `python -m hpctrain.horovod`, and by hpctrain-horovodrun."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
from tables import rows_of

from hpctrain.horovod import absent, alias, variables

MODULE = ("-m", "hpctrain.horovod")
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "horovod" / "train.py"
PROGRAM = Path(sys.executable).with_name("hpctrain-horovodrun")
#: way to start -> words before the script, the launcher's ranks
WAYS = {
    "as it is": (MODULE, 2),
    "horovodrun": ((PROGRAM, "-np", "2", sys.executable), None),
}


@pytest.mark.parametrize("way", rows_of(WAYS, "as it is"))
def test_the_script_of_the_page_learns(start, way):
    words, ranks = WAYS[way]
    completed = start(*words, EXAMPLE, ranks=ranks).finish(timeout=60)
    assert completed.returncode == 0, completed.stderr
    ((count, accuracy),) = re.findall(r"(\d) ranks: accuracy (0\.\d+)", completed.stdout)
    assert int(count) == 2 and float(accuracy) > 0.95


LOADER = """
import torch
from horovod.torch.mpi_ops import synchronize
import horovod.torch as hvd

class Names(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return hvd.__name__, synchronize.__module__ == hvd.allreduce.__module__

if __name__ == "__main__":
    hvd.init()
    for context in ("fork", "spawn", "forkserver"):
        options = {"num_workers": 1, "multiprocessing_context": context}
        loader = torch.utils.data.DataLoader(Names(), **options)
        print(context, {name for names, _ in loader for name in names})
"""


@pytest.mark.either
def test_workers_of_a_loader_find_the_names(start, tmp_path):
    script = tmp_path / "loader.py"
    script.write_text(LOADER)
    completed = start(*MODULE, script).finish(timeout=100)
    assert completed.returncode == 0, completed.stderr
    name = "{'hpctrain.horovod.torch'}"
    assert completed.stdout.splitlines() == [f"{c} {name}" for c in ("fork", "spawn", "forkserver")]


#: the public names of Horovod's modules that scripts import
NAMES = {
    "horovod.common.exceptions": "HorovodInternalError",
    "horovod.common.util": "gloo_built mpi_built nccl_built",
    "horovod.torch": "init rank size local_rank DistributedOptimizer",
    "horovod.torch.compression": "Compression",
    "horovod.torch.elastic": "run TorchState ElasticSampler",
    "horovod.torch.elastic.sampler": "ElasticSampler",
    "horovod.torch.elastic.state": "TorchState",
    "horovod.torch.functions": "allgather_object broadcast_object broadcast_optimizer_state "
    "broadcast_parameters",
    "horovod.torch.mpi_ops": "Adasum Average Sum allreduce allreduce_async_ rank size synchronize",
    "horovod.torch.optimizer": "DistributedOptimizer",
    "horovod.torch.sync_batch_norm": "SyncBatchNorm",
}


NAMES_MISSING = """
import json, sys
from importlib import import_module
ours = import_module("hpctrain.horovod.torch")
for module, names in json.loads(sys.argv[1]).items():
    package = ours.elastic if "elastic" in module else ours
    loaded = import_module(module)
    missing = [n for n in names.split() if getattr(loaded, n, 0) is not getattr(package, n, 1)]
    if missing:
        print(module, *missing)
try:
    import horovod.torch.nonsense
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.either
def test_modules_of_horovod_have_their_public_names(start):
    completed = start(*MODULE, "-c", NAMES_MISSING, json.dumps(NAMES)).finish()
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith("no module 'horovod.torch.nonsense': of Horovod, hpctrain")
    assert completed.stdout.count("\n") == 1


@pytest.fixture
def as_horovod(monkeypatch):
    """Let `import horovod` find our names in this process, for one test."""
    before = {*sys.modules}
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    alias.install()
    yield
    for name in {*sys.modules} - before:
        if name.partition(".")[0] == alias.NAME:
            del sys.modules[name]


@pytest.mark.parametrize("first", ["horovod", "hpctrain.horovod"])
@pytest.mark.parametrize("name", absent.ABSENT)
def test_absent_parts_say_what_to_do(as_horovod, first, name):
    inner = ".keras" if name in ("tensorflow", "spark") else ""
    with pytest.raises(ImportError, match=re.escape(absent.ABSENT[name])) as refusal:
        import_module(f"{first}.{name}{inner}")
    assert str(refusal.value).startswith(f"no hpctrain.horovod.{name}: ")
    assert "\n" not in str(refusal.value)


def test_an_unknown_module_is_named(as_horovod):
    with pytest.raises(ModuleNotFoundError, match=r"no module 'horovod.data': .*horovod\.md"):
        import_module("horovod.data")


@pytest.mark.either
def test_a_horovod_that_is_installed_is_not_used(start, tmp_path):
    package = tmp_path / "site" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise OSError('the real one')")
    code = "import horovod; print(horovod.__name__)"
    env = {"PYTHONPATH": str(package.parent)}
    completed = start(*MODULE, "-c", code, ranks=2, env=env).finish()
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.split() == ["hpctrain.horovod"] * 2
    line = f"hpctrain: `import horovod` is hpctrain.horovod here; {package}/__init__.py is not used"
    assert completed.stderr.count(line) == completed.stderr.count("is not used") == 1


#: place of the error -> the first statements of the script
BEGINS = {
    "before init": "import horovod",
    "after init": "import horovod.torch as hvd; hvd.init()",
}


@pytest.mark.parametrize("place", rows_of(BEGINS, "before init"))
def test_an_error_of_one_rank_ends_the_job(start, place):
    code = (
        f"import os, time; {BEGINS[place]}\n"
        "if '1' in (os.environ.get('OMPI_COMM_WORLD_RANK'), os.environ.get('PMI_RANK')):\n"
        "    raise ValueError('planted')\n"
        "time.sleep(60)"
    )
    completed = start(*MODULE, "-c", code, ranks=2).finish(timeout=40)  # less than the other's rest
    assert completed.returncode == 1, completed.stderr
    assert "] ValueError: planted" in completed.stderr and "rank 1" in completed.stderr
    assert "runpy" not in completed.stderr and "script.py" not in completed.stderr


#: arguments -> exit code, and part of the output
REFUSALS = [
    (("--help",), 0, "mpirun -n 4 python -m hpctrain.horovod train.py"),
    (("no.py",), 2, "hpctrain: no script 'no.py' in "),
]


@pytest.mark.either
@pytest.mark.parametrize(("words", "exit_code", "message"), REFUSALS)
def test_wrong_arguments_are_refused(start, words, exit_code, message):
    completed = start(*MODULE, *words).finish()
    assert (completed.returncode, message in completed.stdout + completed.stderr) == (
        exit_code,
        True,
    )


def test_variables_without_effect_are_named(capsys):
    environ = dict.fromkeys(("HOROVOD_LOG_LEVEL", "HOROVOD_AUTOTUNE", "HOROVOD_WITH_MPI", "X"), "1")
    variables.announce_ignored({**environ, "HOROVOD_FUSION_THRESHOLD": "1"})
    line = "hpctrain: ignored: HOROVOD_AUTOTUNE, HOROVOD_LOG_LEVEL (docs/horovod.md)\n"
    assert capsys.readouterr().err == line
    variables.announce_ignored({"HOROVOD_FUSION_THRESHOLD": "1"})
    assert capsys.readouterr().err == ""
