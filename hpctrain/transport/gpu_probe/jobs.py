"""The jobs in which child.py runs: their commands, and what their exits and outputs mean.

A trial that ends by a signal is a result: this MPI takes no device pointers. One that never starts
is none, and is not cached. Inside an allocation with `srun` on the PATH, srun starts the job, as it
will start the run; else the mpiexec of the MPI that mpi4py loads.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hpctrain.core.interpreter import module_command
from hpctrain.core.launchers import without_rank_variables
from hpctrain.transport.gpu_probe import mpi_claims

PAIR_CLASSES = ("same_gpu", "same_node", "across")
#: A crash takes a second, an MPI that starts 10; a job that hangs is ended.
TIMEOUT_S = 60.0
GRACE_S = 5.0  #: for a launcher to end its ranks
_MAX_STDERR_CHARACTERS = 200  # characters of the stderr of a failed job
MEMTYPE_CACHE = "UCX_MEMTYPE_CACHE"
TIMEOUT_CODE = 1000  # stands for an exit code: no process ends with this one


@dataclass(frozen=True)
class ProbeTrial:
    """The result of a trial: whether each stage was correct (None: not reached), and its GB/s."""

    ipc: bool | None = None
    pointer: bool | None = None
    ipc_gb_s: float | None = None
    pointer_gb_s: float | None = None
    claims: mpi_claims.MpiClaims | None = None  #: None: the job did not start
    ended: str = ""  #: the exit of a failed job, or MPI's error
    ipc_fault: str = ""
    #: (bytes, seconds of a staged message, seconds by pointer), where pointers were right
    sizes: tuple[tuple[int, float, float], ...] = ()
    staged: tuple[tuple[int, float], ...] = ()  #: (bytes, seconds of a message staged), always
    cure: str = ""  #: a variable with which pointers were right, where they failed without it


def trial_from_table(fields: Mapping[str, Any]) -> ProbeTrial:
    """Return the trial of a table that `asdict` made."""
    times = {key: tuple(map(tuple, fields.get(key, ()))) for key in ("sizes", "staged")}
    return ProbeTrial(**{**fields, "claims": _claims_from_table(fields["claims"]), **times})


def _claims_from_table(fields: Mapping[str, Any] | None) -> mpi_claims.MpiClaims | None:
    return (
        mpi_claims.MpiClaims(**{**fields, "libraries": tuple(fields["libraries"])})
        if fields
        else None
    )


def parse_trial(output: str, exit_code: int, stderr: str) -> ProbeTrial:
    """Return the result of a trial's job, from its lines, exit code and stderr."""
    stages: dict[str, dict[str, Any]] = {}
    for line in output.splitlines():
        with suppress(ValueError, KeyError, TypeError):
            report = json.loads(line)
            stages[report.pop("stage")] = report
    started, ipc, pointer = (stages.get(name, {}) for name in ("started", "ipc", "pointer"))
    sizes, staged = (
        tuple(map(tuple, stages.get(name, {}).get("seconds", ()))) for name in ("sizes", "staged")
    )
    return ProbeTrial(
        ipc.get("correct"),
        pointer.get("correct", False if started else None),
        _rate_gb_s(ipc),
        _rate_gb_s(pointer),
        _claims_from_table(started.get("claims")),
        pointer.get("reason", "") if pointer else describe_exit(exit_code, stderr),
        ipc.get("reason", ""),
        sizes,
        staged,
    )


def _rate_gb_s(stage: Mapping[str, Any]) -> float | None:
    return stage.get("gb_s") if stage.get("correct") else None


def describe_exit(exit_code: int, stderr: str) -> str:
    """Return the exit of a job in words; launchers exit with 128 + signal, or with its number."""
    error_tail = " ".join(stderr.split())[-_MAX_STDERR_CHARACTERS:]
    signal_number = (
        -exit_code if exit_code < 0 else exit_code - 128 if exit_code > 128 else exit_code
    )
    if exit_code == TIMEOUT_CODE:
        return f"still running after {TIMEOUT_S:.0f} s"
    has_crashed = "egmentation fault" in stderr or signal_number in (signal.SIGSEGV, signal.SIGBUS)
    if has_crashed:
        return "a crash (segmentation fault)"
    return f"exit code {exit_code}" + (f", {error_tail}" if error_tail else "")


def trial_commands(
    mpiexec: str | None, vendor: str, visible_gpus: int, nodes: int, environ: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return the trial's command for each class of pairs that this machine has."""
    child = module_command("hpctrain.transport.gpu_probe.child")
    pairs = {"same_gpu": "0,0", "same_node": "0,1" if visible_gpus > 1 else "", "across": "0,0"}
    commands = {}
    for name, gpu_numbers in pairs.items():
        is_across = name == "across"
        if gpu_numbers and (nodes > 1 or not is_across):
            launcher_command = _srun_command(vendor, is_across, environ) or (
                None if is_across else _mpiexec_command(mpiexec, vendor)
            )
            if launcher_command:
                commands[name] = [*launcher_command, *child, gpu_numbers]
    return commands


def _srun_command(vendor: str, is_across: bool, environ: Mapping[str, str]) -> list[str] | None:
    if "SLURM_JOB_ID" not in environ or not shutil.which("srun", path=environ.get("PATH")):
        return None
    node_options = ["-N", "2", "--ntasks-per-node=1"] if is_across else ["-N", "1"]
    mpi_options = (
        []
        if "SLURM_MPI_TYPE" in environ or vendor == "Cray MPICH"
        else [f"--mpi={'pmix' if vendor == 'Open MPI' else 'pmi2'}"]
    )
    srun = ["srun", "--overlap", "--kill-on-bad-exit=1", "--input=none"]
    return [*srun, *node_options, "-n", "2", *mpi_options]


def _mpiexec_command(mpiexec: str | None, vendor: str) -> list[str] | None:
    if mpiexec is None:
        return None
    options = ["--bind-to", "none", "--oversubscribe"] if vendor == "Open MPI" else []
    return [mpiexec, *options, "-n", "2"]


def run_trial_and_cure(command: Sequence[str], environ: Mapping[str, str]) -> ProbeTrial:
    """Run a trial; if a UCX with CUDA fails, once more without its cache of memory types.

    CuPy's wheels link CUDA's runtime statically, where UCX does not see its allocations.
    """
    trial = run_trial(command, environ)
    knows_cuda = trial.claims is not None and trial.claims.has_library("libuct_cuda")
    if trial.pointer or not knows_cuda or MEMTYPE_CACHE in environ:
        return trial
    again = run_trial(command, {**environ, MEMTYPE_CACHE: "n"})
    return replace(trial, cure=f"{MEMTYPE_CACHE}=n") if again.pointer else trial


def run_trial(command: Sequence[str], environ: Mapping[str, str]) -> ProbeTrial:
    """Run a trial's job to its end, or to the time limit, and return its result."""
    permissions = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    process = subprocess.Popen(
        command,
        env={**without_rank_variables(environ), **(permissions if os.geteuid() == 0 else {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, stderr = process.communicate(timeout=TIMEOUT_S)
        return parse_trial(output, process.returncode, stderr)
    except subprocess.TimeoutExpired:
        return parse_trial(_stop_job(process), TIMEOUT_CODE, "")
    except BaseException:  # this process must end: no trial outlives it
        _stop_job(process)
        raise


def _stop_job(process: subprocess.Popen[str]) -> str:
    """End a job and return its output.

    Ranks may have left the launcher's process group: only it can end them, so SIGTERM comes first.
    """
    output = b""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        try:
            return process.communicate(timeout=GRACE_S)[0]
        except subprocess.TimeoutExpired as error:  # a process still holds the pipe
            output = error.output or b""
    return output.decode(errors="replace")
