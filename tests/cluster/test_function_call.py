"""ht.launch: results by rank, one error, and what cannot be sent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
from real_slurm import until

import hpctrain as ht
from hpctrain.cluster import function_call
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.transport.placement import core_binding


def total(x: np.ndarray) -> tuple[int, float]:
    world = ht.init("cpu")
    print(f"rank {world.rank} says ä")
    ht.allreduce(x)
    return world.rank, float(x.sum())


def fail(rank: int) -> None:
    world = ht.init("cpu")
    if world.rank == rank:
        raise KeyError("absent")
    world.link.barrier()


def leave(rank: int) -> None:
    if ht.init("cpu").rank == rank:
        sys.exit(3)


def kill(rank: int) -> None:
    if ht.init("cpu").rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)


SCALE = 3.0
ENDS = {
    "a function of a module": (total, [np.ones(2)], [(0, 4.0), (1, 4.0)]),
    "a lambda": (lambda x: total(SCALE * x), [np.ones(2)], [(0, 12.0), (1, 12.0)]),
    "an error of one rank": (fail, [1], (KeyError, "absent", 'rank 1, .*KeyError: .absent.')),
    "an exit": (leave, [0], (HpctrainError, "SystemExit: 3", "in leave")),
    "a killed rank": (kill, [1], (HpctrainError, "gave no result: .* ended with", "")),
    "a result that cannot be sent": (
        lambda: threading.Lock(), [], (UsageError, "the result, of type lock, cannot", "rank"),
    ),
}  # fmt: skip
FIRST = ("a lambda", "an error of one rank")


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in FIRST)) for name in ENDS]
)
def test_a_call_ends_with_results_or_one_error(capsys, name):
    function, args, expected = ENDS[name]
    if isinstance(expected, list):
        assert ht.launch(function, 2, *args) == expected
        assert {f"rank {rank} says ä" for rank in (0, 1)} == {*capsys.readouterr().out.splitlines()}
        return
    kind, text, cause = expected
    with pytest.raises(kind, match=text) as caught:
        ht.launch(function, 2, *args)
    assert re.search(cause, str(caught.value.__cause__), re.DOTALL)


REFUSALS = {
    "an argument": (total, 2, [1, threading.Lock()], "argument 2 cannot be sent .*lock"),
    "a function": (threading.Lock().acquire, 2, [], "the function .*acquire cannot be sent"),
    "no rank": (total, 0, [], "expected 1 rank or more, seen 0"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    function, ranks, args, text = REFUSALS[name]
    with pytest.raises(UsageError, match=text):
        ht.launch(function, ranks, *args)


def test_without_cloudpickle_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert function_call.dump(total)
    with pytest.raises(UsageError, match=r"pip install 'hpctrain\[notebook\]'"):
        ht.launch(lambda: 1, 2)


def test_ranks_have_the_threads_that_the_user_asked_for(monkeypatch):
    """ht.init() of the caller writes its own share of the cores into the variables."""
    monkeypatch.setattr(
        core_binding, "_user_values", {"OMP_NUM_THREADS": "7", "MKL_NUM_THREADS": None}
    )
    environ = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "PATH": "/bin"}
    expected = {"OMP_NUM_THREADS": "7", "PATH": "/bin"}
    assert core_binding.without_limits(environ) == expected
    monkeypatch.setattr(
        function_call.subprocess, "Popen", lambda *_, env, **__: pytest.fail(env["OMP_NUM_THREADS"])
    )
    with pytest.raises(pytest.fail.Exception, match=r"^7$"):
        ht.launch(total, 2, np.ones(2))


def test_in_a_rank_it_is_refused(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "SIZE"):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", "1" if name != "SIZE" else "4")
    with pytest.raises(UsageError, match="starts ranks itself"):
        ht.launch(total, 2)


WAIT = """
import pathlib, sys, time
import hpctrain as ht

def wait(folder):
    pathlib.Path(folder, str(ht.init("cpu").rank)).touch()
    time.sleep(600)

if __name__ == "__main__":
    ht.launch(wait, 2, sys.argv[1])
"""


@pytest.mark.full
@pytest.mark.processes
def test_an_interrupt_ends_the_ranks(tmp_path):
    script = tmp_path / "wait.py"
    script.write_text(WAIT)
    marks = tmp_path / "marks"
    marks.mkdir()
    with subprocess.Popen(
        [sys.executable, script, marks], stderr=subprocess.PIPE, text=True
    ) as process:
        until(lambda: len([*marks.iterdir()]) == 2, 60, "the ranks do not begin")
        ranks = psutil.Process(process.pid).children(recursive=True)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
        assert time.monotonic() - start < 40  # MPICH keeps the first signal from ranks
    assert not psutil.wait_procs(ranks, 10)[1]
