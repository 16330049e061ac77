"""Jobs of real processes with planted faults: waiting for a state, signalling, inspecting."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from limits import clock
from processes import Completed, Job

from hpctrain import watch
from hpctrain.core.run_files import run_folder

MARK = "HPCTRAIN_TEST_JOB"
EVERY = -1  # for `trap`: every rank
NEVER = -2  # for `trap`: no step; -1 is when the model is built


def sets(**keys: object) -> list[str]:
    """Return `--set` arguments; `model_widths` stands for model.widths."""
    return [word for k, v in keys.items() for word in ("--set", f"{k.replace('_', '.', 1)}={v}")]


SMALL = sets(model_widths="[64,16,10]")


@dataclass
class Training:
    """A training job under way, and its folder `out`."""

    job: Job
    out: Path

    def finish(self, timeout: float = 100) -> Completed:
        return self.job.finish(timeout)

    @property
    def summary(self) -> dict | None:
        return run_folder.read_summary(self.out)

    @property
    def steps(self) -> list[int]:
        """The steps with checkpoints, each once; `step-N.2` is step N, saved once more."""
        names = (path.name for path in (self.out / "checkpoints").glob("step-*"))
        return sorted({int(name.removeprefix("step-").partition(".")[0]) for name in names})

    def reach(self, step: int, ranks: int = 2, timeout: float = 60) -> None:
        """Wait until every rank has begun `step`."""
        deadline = clock() + timeout
        while not self._have_begun(step, ranks):
            if clock() > deadline or self.job.process.poll() is not None:
                pytest.fail(f"step {step} was never reached:\n{self.job.output()}")
            time.sleep(0.02)

    def _have_begun(self, step: int, ranks: int) -> bool:
        records = watch.read_records(self.out / "watch")
        return all(rank in records and records[rank].step >= step for rank in range(ranks))


def on_fakes(**options: object) -> dict[str, str]:
    """Return the variables under which `python -m fakes` runs hpctrain on stand-ins for GPUs."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "HPCTRAIN_FAKES": json.dumps(options)}


def memory_files() -> set[str]:
    """Return the names of the files of ranks' shared memory, of other tests' jobs too."""
    return {n for n in os.listdir("/dev/shm") if "hpctrain" in n and "watch" not in n}


def wait_until_removed(files: set[str]) -> None:
    """Wait until each of `files` is gone: other tests run meanwhile, whose files go at once."""
    limit = clock() + 30
    while files := files & memory_files():
        assert clock() < limit, files
        time.sleep(0.02)


def carriers(mark: str) -> list[psutil.Process]:
    """Return the processes started with `mark` in their environment; zombies have none."""
    result = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                result.append(process)
        except psutil.Error:  # it has ended, or is not ours
            continue
    return result


def trap(kind: str, rank: int, step: int = 7) -> list[str]:
    """Return arguments for a model that springs a trap of faults/traps.py on `rank` at `step`."""
    keys = {"model_kind": "traps:model", "model_trap": kind, "model_rank": rank}
    return sets(**keys, model_step=step)


def command_that_resumes(message: str) -> list[str]:
    """Return the command line after `resume: ` in what a job said, which is there once per rank."""
    (line,) = set(re.findall(r"resume: (.*)", message))
    return shlex.split(line)
