"""Command lines and variables of the jobs of cases."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from hpctrain.cluster.launch import find_mpi
from hpctrain.core.errors import UsageError
from hpctrain.core.interpreter import module_command
from hpctrain.tools.chaos.case import Case

# More ranks than cores, and root in containers: MPICH refuses neither, Open MPI does.
OPEN_MPI_VARIABLES = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
LOCAL = ("launch", "mpiexec", "elastic")  #: launchers with the mpiexec of this MPI
ON_THIS_HOST = (*LOCAL, "threads", "netlab")


@dataclass(frozen=True)
class Place:
    """The folders of a case: `work` is the campaign's, `home` the case's, `run` the job's."""

    work: Path
    home: Path

    @property
    def disk(self) -> Path:
        """The folder that holds the job's; where disks are planted, a disk of its own."""
        return self.home / "disk"

    @property
    def recipe(self) -> Path:
        """The recipe of the job."""
        return self.home / "recipe.toml"

    @property
    def run(self) -> Path:
        """The job's folder."""
        return self.disk / "run"

    @property
    def temporary(self) -> Path:
        """The job's folder for temporary files."""
        return self.home / "tmp"


mpi = cache(find_mpi)  #: the MPI that mpi4py loads; raises UsageError if there is none


def mpi_name() -> str:
    """Return the MPI's name in results: openmpi, mpich, ..."""
    return mpi().vendor.lower().replace(" ", "")


def variables(place: Place) -> dict[str, str]:
    """Return the environment of every job of a campaign."""
    own_variables = {
        "HPCTRAIN_TUNING": str(place.work),  # without tables: `auto` is to choose alike
        "TMPDIR": str(place.temporary),
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(place.work / "pycache"),
    }
    # Coverage of the processes under fault would be measured in files that faults damage.
    inherited_variables = {
        k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_PROCESS")
    }
    return {**OPEN_MPI_VARIABLES, "OMP_NUM_THREADS": "1", **inherited_variables, **own_variables}


@dataclass(frozen=True)
class Order:
    """How an attempt is to train: by which launcher, from where, with which settings."""

    launcher: str
    resume: bool = False
    replay: Path | None = None
    settings: tuple[str, ...] = ()
    #: {rank: number of the link call}: threads that are killed
    kills: dict[int, int] = field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        """The arguments of `hpctrain train`."""
        replay = [] if self.replay is None else ["--replay", str(self.replay)]
        settings = [word for setting in self.settings for word in ("--set", setting)]
        return [*["--resume"] * self.resume, *replay, *settings]


def command(case: Case, place: Place, order: Order) -> list[str]:
    """Return the command line that trains `case`."""
    hpctrain, launcher = module_command("hpctrain"), order.launcher
    train = ["train", str(place.recipe), "--out", str(place.run), *order.arguments]
    ranks, options = ["-n", str(case.ranks)], case.options * (launcher == case.launcher)
    if launcher == "launch":
        return [*hpctrain, "launch", *ranks, *options, *train]
    if launcher == "elastic":
        spares = ["--spares", str(case.spares)] if case.spares else []
        return [*hpctrain, "launch", *ranks, "--elastic", *spares, *options, *train]
    if launcher == "netlab":
        hosts = ["--hosts", str(case.ranks)]
        return [*hpctrain, "netlab", *hosts, *options, "--", *hpctrain, *train]
    program = "srun" if launcher == "srun" else str(mpi().mpiexec)
    return [program, *ranks, *options, *hpctrain, *train]


def must_start(launchers: Sequence[str]) -> None:
    """Raise UsageError if a launcher is missing."""
    if "srun" in launchers and (shutil.which("srun") is None or "SLURM_JOB_ID" not in os.environ):
        raise UsageError(
            "launcher srun: expected srun on the PATH and an allocation: call `hpctrain chaos` in "
            "the script of a Slurm job, or under `salloc`"
        )
    if mpi().mpiexec is None and {*launchers} & {*LOCAL, "netlab"}:
        raise UsageError(
            f"no mpiexec belongs to {mpi().vendor} ({mpi().libmpi}), which mpi4py loads; use "
            f"launchers = ['srun'], or another environment than {sys.executable} has"
        )


def undisturbed_launcher(case: Case) -> str:
    """Return the launcher of attempts without faults: mpiexec costs less than `launch`."""
    return "mpiexec" if case.launcher in LOCAL else case.launcher
