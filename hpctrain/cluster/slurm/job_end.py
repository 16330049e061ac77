"""The exit code of a job, read from the summary of its run, since launchers may lose it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.core.printing import say
from hpctrain.core.run_files import last_lines, run_folder

_KNOWN_EXIT_CODES = (0, 1, 2, 3, 75, 86, 130)  # the exit codes with a meaning in hpctrain
_EXIT_REFUSED, EXIT_STOPPED, _EXIT_HUNG, _EXIT_INTERRUPTED = 2, 75, 86, 130
_REPORTED_EXIT_CODES = (2, 3, 75, 86, 130)  # after which the ranks have printed the cause
_FINAL_STATUSES = ("done", "stopped", "failed", "hung")
_BUS_ERROR_HINT = ": a bus error; is /dev/shm full? See `hpctrain doctor`"
# Launchers report a rank that SIGUSR1 has ended as 128 + its number, or as the number; MPICH then
# kills the other ranks, and returns the bitwise or of all codes.
_ENDED_BY_STOP = (signal.SIGUSR1, signal.SIGUSR1 | signal.SIGKILL)
_CLOCK_TICK_S = 0.05  # the clock of file times is coarser than time.time()


class LauncherExit(NamedTuple):
    """The exit code of mpiexec, as in subprocess, and the stop signals that we received."""

    code: int
    signals: tuple[int, ...]

    @property
    def was_killed(self) -> bool:
        """Whether a second Ctrl-C killed the job."""
        return self.signals.count(signal.SIGINT) > 1


#: Returns the exit code of a job, from that of the launcher and that of its run, None without a run
ExitCodeFunction = Callable[[LauncherExit, "int | None"], int]


def is_reported(
    launcher_exit: LauncherExit, announced_folder: bytes, exit_code: ExitCodeFunction
) -> bool:
    """Return whether ranks of hpctrain ended the job, with a code before which they print why."""
    is_own = exit_code is command_exit_code or announced_folder != b""
    return is_own and launcher_exit.code in _REPORTED_EXIT_CODES


def job_exit_code(
    launcher_exit: LauncherExit,
    announced_folder: bytes,
    start_time_s: float,
    exit_code: ExitCodeFunction,
) -> int:
    """Return the exit code of a job that began at `start_time_s`, seconds since the epoch.

    `announced_folder` is the folder of its latest run as rank 0 wrote it, or empty if no run began.
    If the ranks could not write a summary, write one: a rank was lost.
    """
    run = Path(os.fsdecode(announced_folder)) if announced_folder else None
    run = run if run and run.is_dir() else None
    summary = _read_new_summary(run, start_time_s) if run else None
    was_refused = launcher_exit.code == _EXIT_REFUSED and not launcher_exit.was_killed
    if run and summary is None and not was_refused:
        return _record_lost_rank(run, launcher_exit)
    if launcher_exit.was_killed:
        return _EXIT_INTERRUPTED
    return exit_code(launcher_exit, int(summary["exit_code"]) if summary else None)


def _record_lost_rank(run: Path, launcher_exit: LauncherExit) -> int:
    code = _EXIT_INTERRUPTED if launcher_exit.was_killed else 1
    reason = (
        "interrupted twice"
        if launcher_exit.was_killed
        else f"a rank was lost: {_describe_exit(launcher_exit.code)}"
    )
    failure = {"status": "failed", "exit_code": code, "reason": reason}
    summary = (
        (run_folder.read_summary(run) or {}) | failure | {"launcher_exit_code": launcher_exit.code}
    )
    run_folder.write_summary(run, summary)
    operations = f"last operations of each rank: hpctrain hang {run}"
    print_message("\nhpctrain: ".join([reason, operations, *last_lines.last_lines(run)]))
    return code


def command_exit_code(launcher_exit: LauncherExit, run_code: int | None) -> int:
    """Return the exit code of a command of hpctrain: that of its run, if it began one."""
    if run_code is not None:
        return run_code
    if launcher_exit.code in _KNOWN_EXIT_CODES:
        return launcher_exit.code
    if launcher_exit.signals:  # no progress is lost, so the job may simply be started again
        print_message("stopped before a run began")
        return _EXIT_INTERRUPTED if signal.SIGINT in launcher_exit.signals else EXIT_STOPPED
    print_message(f"before a run began, {_describe_exit(launcher_exit.code)}")
    return 1


def program_exit_code(launcher_exit: LauncherExit, run_code: int | None) -> int:
    """Return the exit code of a program: the launcher's, or 128 + N if signal N stopped it.

    If both the program and its run failed, it is that of the run, since launchers change codes. A
    program may fail after its run, or handle the error of a run and succeed.
    """
    if run_code and (launcher_exit.code or run_code == _EXIT_HUNG):
        return run_code
    if launcher_exit.signals and abs(launcher_exit.code) % 128 in _ENDED_BY_STOP:
        stop_signal = signal.Signals(launcher_exit.signals[0])
        print_message(f"stopped by {stop_signal.name}, which the program does not handle")
        return 128 + stop_signal
    return launcher_exit.code if launcher_exit.code >= 0 else 128 - launcher_exit.code


def _read_new_summary(run: Path, start_time_s: float) -> dict[str, Any] | None:
    """Return the final summary that this job wrote, else None."""
    summary = run_folder.read_summary(run)
    if summary is None or summary.get("status") not in _FINAL_STATUSES:
        return None
    modified_s = (run / run_folder.SUMMARY).stat().st_mtime
    return summary if modified_s >= start_time_s - _CLOCK_TICK_S else None


def _describe_exit(code: int) -> str:
    name = code if code >= 0 else signal.Signals(-code).name
    return f"mpiexec ended with {name}{_BUS_ERROR_HINT * (code % 128 == signal.SIGBUS)}"


def print_message(text: str) -> None:
    """Print `text` on stderr as a message of hpctrain."""
    say(f"hpctrain: {text}", err=True)
