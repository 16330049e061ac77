"""Fixtures of all tests: child processes of hpctrain, and the order of tests on MPI ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import ambient  # noqa: F401  # before all others
import coverage
import fakes
import pytest
import real_slurm
import reaper
from leftovers import Guard
from limits import Limits
from lockstep import Lockstep
from processes import BIN, LAUNCHER, Completed, Job
from ranks import job_world, run_on
from tables import Measured, changed_folders, deal, first_ring, half, latin, tenth

# The package sets the BLAS threads of a process that has no such variable, at the first training.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start `python ARGS`, under `launcher` when `ranks` is given: by default our own mpiexec.

    `flags` are for the launcher.
    """
    jobs: list[Job] = []

    def start(
        *args: object,
        ranks: int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path = tmp_path,
        flags: Sequence[str] = (),
        launcher: Sequence[str] = (str(BIN / "mpiexec"),),
    ) -> Job:
        of_ranks = [] if ranks is None else [*launcher, *flags, "-n", str(ranks)]
        command = [*of_ranks, sys.executable, *map(str, args)]
        jobs.append(Job(command, env or {}, cwd, tmp_path / f"job-{len(jobs)}"))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


@pytest.fixture
def hpctrain(start: Callable[..., Job]) -> Callable[..., Completed]:
    """Run `hpctrain ARGS` to its end; `ranks`, `env` and `cwd` as in `start`."""

    def hpctrain(*args: object, timeout: float = 100, **options: object) -> Completed:
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
    # The long addresses of UCX do not always come through Slurm's PMI: see docs/slurm.md.
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
    with fakes.installed(races=True) as machine:
        yield machine


@pytest.fixture
def lazy_gpu() -> Iterator[fakes.Machine]:
    """Yield the same, on which work is done when somebody waits for its stream, not before."""
    with fakes.installed(lazy=True) as machine:
        yield machine


@pytest.fixture(scope="session", autouse=True)
def _world(request: pytest.FixtureRequest) -> None:
    """Make the World of a job of MPI, whose watch is a thread, before the guard looks."""
    if request.config.getoption("--with-mpi"):
        job_world()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Callable[..., list]:
    """Run a body on the ranks that `on_ranks` names; see ranks.py."""
    kind, size = request.param

    def run(body: Callable, *args: object) -> list:
        return run_on(kind, size, lambda world: body(world, *args))

    run.size = size
    return run


@pytest.fixture(scope="session")
def zarr_loop() -> None:
    """Start the event loop of Zarr, whose thread and descriptors last as long as the process."""
    import zarr

    zarr.open_group({}, mode="w").create_array("x", shape=(1,), dtype="i4")[:]


@pytest.fixture
def crossed(request: pytest.FixtureRequest) -> Callable[..., list[tuple]]:
    """Cross columns: with --full all rows of the product, else those of `tables.latin`."""
    full = request.config.getoption("--full")
    return lambda *columns, begin=0: [*(product(*columns) if full else latin(columns, begin))]


#: the first word of -m, and what files have that such rows are in
WORDS = {"mpi": ("on_ranks", "on_grids", "mark.mpi"), "processes": ("mark.processes",)}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--first", action="store_true", help="run each value of a table once")
    parser.addoption("--full", action="store_true", help="also run the rows that take long")
    parser.addoption(
        "--tenth", type=int, metavar="K", help="run a tenth of what --full adds to --first"
    )
    parser.addoption(
        "--either",
        type=int,
        choices=(0, 1),
        help="run half of the rows that are the same with either MPI",
    )
    parser.addoption(
        "--half", type=int, choices=(0, 1), help="run half of the files, by their names"
    )


def pytest_configure(config: pytest.Config) -> None:
    abort, folder = None, reaper.start()
    if config.getoption("--with-mpi"):
        reaper.end_with_launcher()
        # Before hpctrain asks mpi4py not to initialise: pytest-mpi needs MPI until the very end.
        from mpi4py import MPI

        config.pluginmanager.register(Lockstep(config, MPI.COMM_WORLD.Dup()), "lockstep")
        abort = partial(MPI.COMM_WORLD.Abort, 1)
    else:  # not on ranks, whose MPI library may expect their files in one folder
        reaper.move_temporary_files(folder)
    if not config.getoption("usepdb"):
        config.pluginmanager.register(Limits(abort), "limits")
    config.pluginmanager.register(Guard(on_mpi=config.getoption("--with-mpi")), "guard")
    if coverage.Coverage.current():
        config.pluginmanager.register(Measured(), "measured")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of the other half, and files that have no rows as -m wants them."""
    if not collection_path.match("test_*.py"):
        return None
    if config.getoption("--half") not in (None, half(collection_path)):
        return True
    words = WORDS.get(config.option.markexpr.partition(" ")[0])
    text = collection_path.read_text() if words else ""
    return True if words and not any(word in text for word in words) else None


@pytest.hookimpl(tryfirst=True)  # of whole tables, before -m and -k take rows away
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (number := config.getoption("--tenth")) is not None:
        config.option.full = True
        _keep(config, items, tenth(items, number))
        items.sort(key=partial(_is_unchanged, changed_folders(config.rootpath)))
    elif config.getoption("--first"):
        _keep(config, items, first_ring(items))
    elif not config.getoption("--full") and not any("::" in arg for arg in config.args):
        _keep(config, items, {item.nodeid for item in items if "full" not in item.keywords})
    if (number := config.getoption("--either")) is not None:
        _keep(config, items, deal(items, number))


def _keep(config: pytest.Config, items: list[pytest.Item], names: set[str]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in names])
    items[:] = [item for item in items if item.nodeid in names]


def _is_unchanged(changed: set[str], item: pytest.Item) -> bool:
    return item.nodeid.split("/")[1] not in changed
