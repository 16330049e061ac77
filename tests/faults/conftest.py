"""Fixtures that start training jobs with planted faults, and verify that nothing is left behind."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from jobs import MARK, NEVER, SMALL, Training, carriers, on_fakes, sets, trap
from limits import clock
from processes import Job
from ranks import run_on

from hpctrain import data
from hpctrain.training import recipe, runs

LOCAL = Path(__file__).parent


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """Return a word that the processes of this test carry; none may be left at its end."""
    yield str(tmp_path)
    deadline = clock() + 30
    while (remaining := carriers(str(tmp_path))) and clock() < deadline:
        time.sleep(0.05)
    reported = [f"{process.pid}: {process.status()}" for process in remaining]
    for process in remaining:
        process.kill()
    assert reported == []


@pytest.fixture
def begin(start: Callable[..., Job], tmp_path: Path, mark: str) -> Callable[..., Training]:
    """Start `hpctrain train ARGS --out DIR` on ranks, under mpiexec or `hpctrain launch`.

    With `gpus`, options of `fakes.installed`, on stand-ins for GPUs.
    """
    shutil.copy(LOCAL / "traps.py", tmp_path)  # found in the folder where the job is started

    def begin(
        *args: object,
        ranks: int | None = 2,
        launch: bool = False,
        out: str = "run",
        gpus: dict[str, object] | None = None,
    ) -> Training:
        command = ["-m", "hpctrain" if gpus is None else "fakes"]
        command += ["launch", "-n", ranks] if launch else []
        command += ["train", *(args or ["digits"]), "--out", out]
        env = {MARK: mark, "OMP_NUM_THREADS": "1"}
        if gpus is not None:
            command += ["--device", "gpu"]
            env |= on_fakes(**gpus)
        job = start(*command, ranks=None if launch else ranks, env=env)
        return Training(job, tmp_path / out)

    return begin


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments for a small model on the digits, from a file."""
    train, test, _ = data.DigitsOptions().load(seed=0)
    file = tmp_path_factory.mktemp("digits") / "digits.npz"
    np.savez(file, x=train.x, y=train.y, x_test=test.x, y_test=test.y)
    return [*SMALL, *sets(data_kind="npz", data_path=file)]


@pytest.fixture
def digits(begin: Callable[..., Training], small: list[str]) -> Callable[..., Training]:
    """Start to train a small model on the digits; `begin` with a recipe."""
    return lambda *args, **options: begin("digits", *small, *args, **options)


@pytest.fixture
def undisturbed(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict]:
    """Train the same with the trap at no step, on ranks that are threads; return the summary."""
    monkeypatch.syspath_prepend(LOCAL)

    def undisturbed(*args: str, ranks: int = 2) -> dict:
        never = trap("none", 0, NEVER)
        spec = recipe.load("digits", [*small, *args, *never][1::2])
        body = partial(runs.train, spec, out=tmp_path / "whole", resume=False)
        return run_on("threads", ranks, body)[0]

    return undisturbed
