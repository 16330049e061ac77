"""Start training jobs that are to fail, and prove that nothing of them stays behind."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Job
from jobs import MARK, SMALL, Training, carriers

HERE = Path(__file__).parent


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """Return a word that the processes of this test carry; none may be left at its end."""
    yield str(tmp_path)
    deadline = time.monotonic() + 5
    while (left := carriers(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.05)
    told = [f"{process.pid}: {process.status()}" for process in left]
    for process in left:
        process.kill()
    assert told == []


@pytest.fixture
def begin(start: Callable[..., Job], tmp_path: Path, mark: str) -> Callable[..., Training]:
    """Start `hpctrain train ARGS --out DIR` on ranks, under mpiexec or `hpctrain launch`."""
    shutil.copy(HERE / "traps.py", tmp_path)  # found in the folder where the job is started

    def begin(
        *args: object, ranks: int | None = 2, launch: bool = False, out: str = "run"
    ) -> Training:
        command = ["-m", "hpctrain", *(["launch", "-n", ranks] if launch else [])]
        command += ["train", *(args or ["digits"]), "--out", out]
        env = {MARK: mark, "OMP_NUM_THREADS": "1"}
        job = start(*command, ranks=None if launch else ranks, env=env)
        return Training(job, tmp_path / out)

    return begin


@pytest.fixture
def digits(begin: Callable[..., Training]) -> Callable[..., Training]:
    """Start to train a small model on the digits; `begin` with a recipe."""
    return lambda *args, **options: begin("digits", *SMALL, *args, **options)
