"""Child processes of tests: commands under way, their output, and their end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import reaper
from limits import clock

BIN = Path(sys.executable).parent
# More ranks than cores, and root in containers: MPICH wants no leave for either, Open MPI does.
LAUNCHER = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@dataclass(frozen=True)
class Completed:
    """The exit code of a command, and its output."""

    returncode: int
    stdout: str
    stderr: str


class Job:
    """A command under way, with all processes below it; its output can be read meanwhile."""

    def __init__(self, command: list[str], env: Mapping[str, str], cwd: Path, log: Path) -> None:
        self._logs = log.with_suffix(".stdout"), log.with_suffix(".stderr")
        with open(self._logs[0], "w") as out, open(self._logs[1], "w") as err:
            # A launcher of Open MPI that is killed leaves its folder, named by its process number;
            # the next launcher with that number would not start.
            folder = {"PRTE_MCA_prte_tmpdir_base": str(log.with_suffix(".prte"))}
            environment = {**os.environ, **LAUNCHER, **folder, **env}
            # A session of its own: a Ctrl-C for the tests does not reach it, its own can be sent.
            self.process = subprocess.Popen(
                command, env=environment, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip

    def finish(self, timeout: float = 60) -> Completed:
        """Wait for the end; after `timeout` paced seconds kill every process and fail the test."""
        deadline = clock() + timeout
        while (returncode := self.process.poll()) is None:
            if clock() > deadline:
                self.kill()
                pytest.fail(
                    f"still running after {timeout} s: {self.process.args}\n{self.output()}"
                )
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
        return Completed(returncode, *(log.read_text() for log in self._logs))

    def output(self) -> str:
        """Return what was said so far, stdout first."""
        return "".join(log.read_text() for log in self._logs)

    def until(self, text: str, timeout: float = 60) -> None:
        """Wait until `text` was said; fail the test if the job ends or `timeout` passes first."""
        deadline = clock() + timeout
        while text not in self.output():
            if clock() > deadline or self.process.poll() is not None:
                pytest.fail(f"{text!r} was never said:\n{self.output()}")
            time.sleep(0.02)

    def ranks(self) -> list[psutil.Process]:
        """Return the Python processes below this one, oldest first."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                found.append((process.create_time(), process.name(), process))
        found.sort(key=lambda facts: facts[0])
        return [process for _, name, process in found if "python" in name]

    def kill(self) -> None:
        """Kill the command and all below it: ranks have process groups of their own."""
        if self.process.poll() is None:
            reaper.end(lambda: reaper.with_descendants({self.process.pid}))
            self.process.wait()
