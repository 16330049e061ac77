"""Fixtures of all tests: child processes of hpctrain, and the order of tests on MPI ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import coverage
import fakes
import psutil
import pytest
import real_slurm
from ranks import run_on
from tables import Measured, latin, spare

BIN = Path(sys.executable).parent
# More ranks than cores, and root in containers: MPICH wants no leave for either, Open MPI does.
LAUNCHER = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
# A folder without tables of `hpctrain tune`: what `auto` takes must not depend on who tests.
os.environ["HPCTRAIN_TUNING"] = str(Path(__file__).parent)
# Who starts the tests in the background has SIGINT ignored, and so would all that they start: what
# is to be ended by it would live until SIGKILL.
signal.signal(signal.SIGINT, signal.default_int_handler)
STRAGGLER_S = 5.0  # how long a rank whose test failed waits for the others


@dataclass(frozen=True)
class Completed:
    """How a command ended, what it said and how long it took."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float


class Job:
    """A command under way, with all processes below it; its output can be read meanwhile."""

    def __init__(self, command: list[str], env: Mapping[str, str], cwd: Path, log: Path) -> None:
        self._logs = log.with_suffix(".stdout"), log.with_suffix(".stderr")
        self._began = time.monotonic()
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
        """Wait for the end; after `timeout` seconds kill every process and fail the test."""
        try:
            returncode = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"still running after {timeout} s: {self.process.args}\n{self.output()}")
        seconds = time.monotonic() - self._began
        return Completed(returncode, *(log.read_text() for log in self._logs), seconds)

    def output(self) -> str:
        """Return what was said so far, stdout first."""
        return "".join(log.read_text() for log in self._logs)

    def until(self, text: str, timeout: float = 30) -> None:
        """Wait until `text` was said; fail the test if the job ends or `timeout` passes first."""
        deadline = time.monotonic() + timeout
        while text not in self.output():
            if time.monotonic() > deadline or self.process.poll() is not None:
                pytest.fail(f"{text!r} was never said:\n{self.output()}")
            time.sleep(0.02)

    def ranks(self) -> list[psutil.Process]:
        """Return the Python processes below this one, oldest first."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return sorted((p for p in below if "python" in p.name()), key=lambda p: p.create_time())

    def kill(self) -> None:
        """Kill the command and all below it: ranks have process groups of their own."""
        if self.process.poll() is None:
            tree = psutil.Process(self.process.pid).children(recursive=True)
            for process in (self.process, *tree):
                process.kill()
            self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start `python ARGS`, under the mpiexec of this environment when `ranks` is given.

    `flags` are for mpiexec.
    """
    jobs: list[Job] = []

    def start(
        *args: object,
        ranks: int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path = tmp_path,
        flags: Sequence[str] = (),
    ) -> Job:
        launcher = [] if ranks is None else [str(BIN / "mpiexec"), *flags, "-n", str(ranks)]
        command = [*launcher, sys.executable, *map(str, args)]
        jobs.append(Job(command, env or {}, cwd, tmp_path / f"job-{len(jobs)}"))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


@pytest.fixture
def hpctrain(start: Callable[..., Job]) -> Callable[..., Completed]:
    """Run `hpctrain ARGS` to its end; `ranks`, `env` and `cwd` as in `start`."""

    def hpctrain(*args: object, timeout: float = 60, **options: object) -> Completed:
        return start("-m", "hpctrain", *args, **options).finish(timeout)

    return hpctrain


@pytest.fixture(scope="session")
def slurm_daemons() -> Iterator[real_slurm.Slurm]:
    """Start a Slurm of four nodes, once for all tests that ask for it."""
    if reason := real_slurm.missing():
        pytest.skip(reason)
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    # Four nodes share the cores of one: whoever waits is to let others compute.
    own = {**LAUNCHER, "PATH": path, "OMPI_MCA_mpi_yield_when_idle": "1"}
    # The long addresses of UCX do not always come through Slurm's PMI: see docs/sharp-bits.md.
    own |= {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
    with real_slurm.running({**os.environ, **own}) as slurm:
        yield slurm


@pytest.fixture
def slurm(slurm_daemons: real_slurm.Slurm) -> Iterator[real_slurm.Slurm]:
    """Yield a real Slurm of four nodes, and end the jobs that the test submits; see real_slurm."""
    own = replace(slurm_daemons, jobs=[])
    yield own
    own.clear()


@pytest.fixture
def gpu() -> Iterator[fakes.Machine]:
    """Yield a machine with stand-ins for CuPy and one GPU."""
    with fakes.installed() as machine:
        yield machine


@pytest.fixture
def lazy_gpu() -> Iterator[fakes.Machine]:
    """Yield the same, on which work is done when somebody waits for its stream, not before."""
    with fakes.installed(lazy=True) as machine:
        yield machine


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Callable[..., list]:
    """Run a body on the ranks that `on_ranks` names; see ranks.py."""
    kind, size = request.param

    def run(body: Callable, *args: object) -> list:
        return run_on(kind, size, lambda world: body(world, *args))

    run.size = size
    return run


@pytest.fixture
def crossed(request: pytest.FixtureRequest) -> Callable[..., list[tuple]]:
    """Cross columns: with --full all rows of the product, else those of `tables.latin`."""
    full = request.config.getoption("--full")
    return lambda *columns, begin=0: [*(product(*columns) if full else latin(columns, begin))]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests that take long")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--with-mpi"):
        # Before hpctrain asks mpi4py not to initialise: pytest-mpi needs MPI until the very end.
        from mpi4py import MPI

        config.pluginmanager.register(Lockstep(config, MPI.COMM_WORLD.Dup()), "lockstep")
    if coverage.Coverage.current():
        config.pluginmanager.register(Measured(), "measured")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without rows on MPI ranks where none else are run: each rank collects."""
    if config.option.markexpr != "mpi" or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    words = ("on_ranks", "on_grids", "mark.mpi")
    return None if any(word in text for word in words) else True


@pytest.hookimpl(tryfirst=True)  # before any are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        for item in items:
            if "full" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="takes long: needs --full"))
        for item in spare(items):
            item.add_marker(pytest.mark.skip(reason="its pairs meet in other rows: needs --full"))


class Lockstep:
    """Ranks go from test to test together; one that fails alone ends the job with its report.

    Otherwise the others would wait in a collective for the rank that left it by an exception.
    """

    def __init__(self, config: pytest.Config, comm) -> None:
        self._writer = config.get_terminal_writer
        self._comm = comm
        self._failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failures.append(f"{report.nodeid} ({report.when})\n{report.longreprtext}")

    def pytest_runtest_logfinish(self) -> None:
        everyone = self._comm.Ibarrier()
        limit = time.monotonic() + STRAGGLER_S
        while not everyone.Test():
            if self._failures and time.monotonic() > limit:
                self._abort()
            time.sleep(0.001)  # ranks share cores with those still at work
        self._failures.clear()

    def _abort(self) -> None:
        self._writer().line("\n" + "\n".join(self._failures))
        self._writer().line(f"rank {self._comm.rank} failed, others did not come: ending the job")
        self._writer().flush()
        self._comm.Abort(1)
