"""Scripts made for torchrun under other launchers: variables, losses, ends, and what is printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from guests import torchrun_scripts
from guests.torchrun_scripts import SCRIPTS

SCRIPT = Path(torchrun_scripts.__file__)
MODULE = ("-m", "hpctrain.torch")
LAUNCH = ("-m", "hpctrain", "launch", "-n", "2", "--", sys.executable)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
#: how two ranks are started: the words before the script, and the ranks that mpiexec starts
STARTERS = {"mpirun": (MODULE, 2), "launch": (LAUNCH, None), "torchrun": (TORCHRUN, None)}
#: script, starter, backend: the first rows have each of these once
ROWS = [
    ("gpt", "mpirun", "hpctrain"),
    ("sharded", "launch", "hpctrain"),
]
#: the same with either MPI
GLOO_ROWS = [("tutorial", "launch", "gloo"), ("tensor parallel", "mpirun", "gloo")]
OTHER_ROWS = [
    (script, starter, backend)
    for script in SCRIPTS
    for starter in STARTERS
    for backend in ("hpctrain", "gloo")
    if (script, starter, backend) not in ROWS + GLOO_ROWS
    and (starter, backend) != ("torchrun", "hpctrain")
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("script", "starter", "backend"),
    [
        *ROWS,
        *(pytest.param(*row, marks=pytest.mark.either) for row in GLOO_ROWS),
        *(pytest.param(*row, marks=pytest.mark.full) for row in OTHER_ROWS),
    ],
)
def test_losses_are_those_of_one_process(start, script, starter, backend):
    words, ranks = STARTERS[starter]
    completed = start(*words, SCRIPT, script, backend, ranks=ranks).finish(timeout=200)
    assert completed.returncode == 0, completed.stderr
    losses = json.loads(completed.stdout)
    assert np.abs(np.subtract(losses, torchrun_scripts.reference(script))).max() < 1e-12
    assert len(set(losses)) == len(losses)
    assert "independently" not in completed.stderr


@pytest.mark.either
@pytest.mark.parametrize("silenced", [False, pytest.param(True, marks=pytest.mark.full)])
def test_independent_trainings_are_named_once(start, silenced):
    """Without RANK each process of a plain mpirun trains by itself; the exit code stays."""
    env = {"HPCTRAIN_INDEPENDENT": "1"} if silenced else {}
    completed = start(SCRIPT, "gpt", "hpctrain", ranks=2, env=env).finish(timeout=200)
    assert completed.returncode == 0, completed.stderr
    assert len(completed.stdout.splitlines()) == 2
    assert completed.stderr.count("train 2 models independently") == (0 if silenced else 1)
    assert ("`python -m hpctrain.torch SCRIPT`" in completed.stderr) != silenced


#: how a process of several may train, and whether that is named
TRAININGS = {
    "sync": ("import hpctrain as ht; ht.torch.sync(model, optimizer)", False),
    "a group": ("import torch.distributed as dist; dist.init_process_group('gloo')", False),
    "mpi4py": ("from mpi4py import MPI", False),
    "alone": ("", True),
}
TRAINING = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{together}
for _ in range(2):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.full
@pytest.mark.parametrize("kind", TRAININGS)
@pytest.mark.parametrize("words", [(), MODULE])
def test_only_independent_trainings_are_named(start, kind, words):
    together, is_named = TRAININGS[kind]
    is_named = is_named or (kind == "mpi4py" and words == MODULE)  # it has started MPI for all
    completed = start(*words, "-c", TRAINING.format(together=together), ranks=2).finish(timeout=200)
    assert completed.returncode == 0, completed.stderr
    assert completed.stderr.count("train 2 models independently") == int(is_named)


ENVIRONMENT = """
import os, torch, torch.distributed as dist
{before}
dist.init_process_group({backend!r})
x = torch.full((1,), 1.0 + dist.get_rank())
dist.all_reduce(x)
words = ("sum", x.item(), "local", os.environ["LOCAL_RANK"], "rank", os.environ.get("RANK"))
print(" ".join(map(str, words)) + "\\n", end="", flush=True)
dist.destroy_process_group()
"""
RANKS_ONLY = (
    "import mpi4py; mpi4py.rc.initialize = False\n"
    "from hpctrain.core.launchers import launched\n"
    "job = launched(os.environ)\n"
    "os.environ |= {'RANK': str(job.rank), 'WORLD_SIZE': str(job.size)}"
)
#: the environment before the launcher, code of the script before init, backend, what is printed
STRANGERS = {
    "stale": (
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "7", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
        "",
        "gloo",
        "unset ",
    ),
    "of another size": ({"RANK": "5", "WORLD_SIZE": "8"}, "", "hpctrain", "unset RANK WORLD_SIZE"),
    "address alone": ({"MASTER_ADDR": "no.such.host"}, "", "gloo", ""),
    "ranks alone": ({}, RANKS_ONLY, "hpctrain", ""),
    "ranks alone, gloo": ({}, RANKS_ONLY, "gloo", ""),
    "in another order": (
        {},
        RANKS_ONLY + "; os.environ['RANK'] = str(1 - job.rank)",
        "hpctrain",
        "",
    ),
}
FULL = ("of another size", "address alone", "ranks alone", "in another order")


@pytest.mark.either
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.full] * (case in FULL)) for case in STRANGERS],
)
def test_variables_of_others_do_not_change_the_ranks(start, case):
    env, before, backend, message = STRANGERS[case]
    code = ENVIRONMENT.format(before=before, backend=backend)
    completed = start("-c", code, ranks=2, env=env).finish(timeout=200)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.count("sum 3.0") == 2
    assert {line.split()[3] for line in completed.stdout.splitlines()} == {"0", "1"}
    assert completed.stderr.count("hpctrain: ") == int(message != "")
    assert message in completed.stderr


#: code before init, backend -> the line
REFUSALS = {
    "size": ("os.environ |= {'RANK': '0', 'WORLD_SIZE': '3'}", "rank 0 of 3, but "),
    "equal ranks": (
        "os.environ |= {'RANK': '1', 'WORLD_SIZE': '2'}",
        "expected each of the ranks 0 to 1 once, seen 1, 1: unset RANK",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("words", [(), MODULE])
@pytest.mark.parametrize("case", REFUSALS)
def test_ranks_of_others_are_refused_in_one_line(start, case, words):
    before, line = REFUSALS[case]
    code = ENVIRONMENT.format(before=before, backend="hpctrain")
    completed = start(*words, "-c", code, ranks=2).finish(timeout=200)
    assert completed.returncode != 0
    assert line in completed.stderr and "Traceback" not in completed.stderr


ALONE = ENVIRONMENT.format(before="", backend="hpctrain")


@pytest.mark.full
@pytest.mark.either
def test_ranks_without_a_launcher_are_refused(start):
    completed = start("-c", ALONE, env={"RANK": "1", "WORLD_SIZE": "4"}).finish(timeout=200)
    assert completed.returncode == 2
    assert (
        "no launcher of MPI has started this script: start it with `mpirun -n 4" in completed.stderr
    )


@pytest.mark.full
@pytest.mark.either
@pytest.mark.parametrize("variable", ["TORCH_DEVICE_BACKEND_AUTOLOAD", "HPCTRAIN_TORCH"])
def test_the_backend_is_there_unless_it_is_disabled(start, variable):
    code = "import torch.distributed as d; print('hpctrain' in d.Backend.backend_list)"
    completed = start(*MODULE, "-c", code, env={variable: "0"}).finish(timeout=200)
    assert completed.stdout.split() == [str(variable != "HPCTRAIN_TORCH")], completed.stderr
